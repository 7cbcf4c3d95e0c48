"""The engine process: started by an API process with a ``LaunchSpec`` on standard input.

``python -m fwk.engine.process``. It imports before it is told what to load, so that its parent can start it early. It
ends when told to, when its engine fails, or when its parent is gone.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import zmq

from fwk.config.wire import from_plain
from fwk.errors import FwkError, PluginError, one_line_traceback
from fwk.plugins import PluginSet, discover, plugin_that_raised
from fwk.plugins.audit import Audit
from fwk.plugins.factory import code_owners
from fwk.types import EngineFailed, EngineReady
from fwk_process.crash import crash_file, record_crashes
from fwk_process.forks import fork_on_demand
from fwk_process.gc import gc_paused
from fwk_process.log import set_up_log
from fwk_process.malloc import Heap
from fwk_process.oom import prefer_as_victim
from fwk_process.parent import continue_with_parent_gone, ignore_terminal_signals, name_process
from fwk_process.progress import set_up_progress

log = logging.getLogger("fwk.engine")

EXIT_FAILED = 70
EXIT_NOT_STARTED = 78


class LaunchSpec(msgspec.Struct):
    """What the parent settled: the configuration, the set of plugins, where to meet, and who will come."""

    address: str
    client: str  # secret: the socket's identity of the only one who is listened to
    config: dict[str, Any]
    fingerprint: str
    engine_index: int = 0
    name: str = "engine"  # in the log


def main() -> int:
    """Load, serve, end. The exit code tells why. With a descriptor as argument: in forks of this process."""
    ignore_terminal_signals()
    continue_with_parent_gone()
    with gc_paused():
        from fwk.engine.loop import EngineLoop, bind, meet  # noqa: PLC0415 - torch comes with it, before there is a spec
    if len(sys.argv) > 1:
        fork_on_demand(int(sys.argv[1]), "fwk-forks", "fwk.engine.process")
        name_process("fwk-engine")
    prefer_as_victim()
    spec = ParentPipe().spec()
    context = zmq.Context[zmq.Socket[bytes]]()
    wire = bind(context, spec.address)
    config = from_plain(spec.config)
    set_up_log(config.server.log_level, config.server.log_format, spec.name)
    set_up_progress(not config.engine.disable_progress_bars and spec.engine_index == 0)
    import torch  # noqa: PLC0415

    meet(wire, spec.address, spec.client)
    try:
        engine, plugins, ready = _load(spec)
    except FwkError as error:
        _report(wire, str(error), error.exit_code)
        return EXIT_NOT_STARTED
    except (Exception, SystemExit) as error:
        log.debug("the engine could not be started", exc_info=error)
        _report(wire, f"the engine could not be started: {one_line_traceback(error)}", None)
        return EXIT_NOT_STARTED
    loop = EngineLoop(engine, wire, ready, spec.client.encode())
    gc.collect()
    gc.freeze()  # what is alive now stays; collections need not look at it again
    Heap().trim()  # what loading took besides
    try:
        with torch.inference_mode():
            loop.run()
    except FwkError as error:
        log.debug("the engine stops", exc_info=error)
        # Who hears it logs it, with what is done about it.
        loop.fail(str(error), getattr(error, "detail", "") or one_line_traceback(error.__cause__ or error))
        return EXIT_FAILED
    except (Exception, SystemExit) as error:
        where = plugin_that_raised(plugins, error)
        log.debug("the engine stops", exc_info=error)
        loop.fail(
            f"{type(error).__name__} in the engine",
            f"{one_line_traceback(error)} in {where}" if where else one_line_traceback(error),
        )
        return EXIT_FAILED
    finally:
        engine.close()
        wire.close()
        context.term()
    return 0


def _load(spec: LaunchSpec) -> tuple[Any, PluginSet, EngineReady]:
    from fwk.engine.core import build_engine  # noqa: PLC0415
    from fwk.setup.checkpoint import open_model  # noqa: PLC0415
    from fwk.setup.resolve import resolve  # noqa: PLC0415

    config = from_plain(spec.config)
    plugins = discover(config.plugins.allow_override)
    if plugins.fingerprint != spec.fingerprint:
        raise PluginError(
            f"the engine process sees other plugins ({plugins.fingerprint}) than the server ({spec.fingerprint}): "
            "something was installed in between; restart"
        )
    Audit(plugins, is_strict=config.plugins.strict)
    record_crashes(crash_file(spec.address), code_owners(plugins))
    setup = resolve(config, open_model(config, plugins, log.info), plugins)
    engine = build_engine(config, plugins, setup, spec.engine_index)
    info = engine.info
    ready = EngineReady(
        plugins.fingerprint,
        info.num_blocks,
        info.block_size,
        info.max_model_len,
        info.vocab_size,
        info.chosen,
        info.reasons,
        info.refused,
        info.num_block_tables,
        info.weights_identity,
    )
    return engine, plugins, ready


def _report(wire: zmq.Socket[bytes], message: str, exit_code: int | None) -> None:
    """Tell the parent, which has sent a ping by now or will once it is ready, why there is no engine."""
    if wire.poll(30_000):
        client = wire.recv_multipart()[0]
        wire.send_multipart([client, msgspec.msgpack.encode(EngineFailed(message, exit_code=exit_code))])
    wire.close(linger=1000)


class ParentPipe:
    """Standard input: a line comes with the spec, and then nothing until the parent is gone; so are we then.

    Reads the descriptor itself: a thread inside ``sys.stdin`` holds its lock, and the interpreter could not end.
    """

    def __init__(self) -> None:
        self._spec: Future[LaunchSpec] = Future()
        threading.Thread(target=self._follow, daemon=True).start()

    def spec(self) -> LaunchSpec:
        """Waits until the parent has told it."""
        return self._spec.result()

    def _follow(self) -> None:
        line = b""
        while part := os.read(0, 1 << 16):
            if not self._spec.done():
                line += part
                if line.endswith(b"\n"):
                    self._spec.set_result(msgspec.json.decode(line, type=LaunchSpec))
        if self._spec.done():
            path = Path(self._spec.result().address.removeprefix("ipc://"))
            with contextlib.suppress(OSError):  # a parent that ended well has removed them itself
                crash_file(self._spec.result().address).unlink(missing_ok=True)
                path.unlink(missing_ok=True)
                path.parent.rmdir()
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
