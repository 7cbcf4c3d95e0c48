"""An engine process of ours, from its start to its end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fwk.interfaces.parallel import threads_each
from fwk_process.crash import HANGS
from fwk_process.kernel_caches import bound_kernel_caches
from fwk_process.parent import terminal_signals_blocked
from fwk_process.threads import configure_omp_env

if TYPE_CHECKING:
    from concurrent.futures import Future

    from fwk.engine.process import LaunchSpec


class EngineProcess:
    """Imports what every engine needs as soon as it is made, and loads the model once it is told which (``tell``).

    It ends by itself when this process does, or lets go of it. ``num_engines`` share the machine's cores. ``module``:
    what is run instead, and speaks for an engine elsewhere.
    """

    def __init__(self, num_engines: int = 1, module: str = "") -> None:
        command = [sys.executable, "-P", "-m", module or "fwk.engine.process"]  # -P: no code from the current directory
        with terminal_signals_blocked():
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=_environment(num_engines), bufsize=0)
        self._ended: Future[int] | None = None
        self.model_bytes = 0
        """What the model's files hold, where that is known before it is told what to load."""

    def tell(self, spec: LaunchSpec) -> None:
        """What to load and where to meet. One that has died already is told in vain."""
        import msgspec  # noqa: PLC0415 - not before an early engine has been started

        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            told = msgspec.structs.replace(spec, model_bytes=self.model_bytes)
            self._process.stdin.write(msgspec.json.encode(told) + b"\n")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """End it, also one that is stopped."""
        self._process.kill()

    def write_stack(self) -> None:
        """Have it note where it is (``fwk_process.crash``), unless it is stopped."""
        self._process.send_signal(HANGS)

    def discard(self) -> None:
        """End it for good, where no event loop runs."""
        self._process.kill()
        self._process.wait()
        self.release()

    async def wait(self) -> int:
        """Its exit code, once it has ended; a signal's number is negative."""
        import asyncio  # noqa: PLC0415 - as msgspec
        from concurrent.futures import Future  # noqa: PLC0415

        if self._ended is None:
            self._ended = Future()
            threading.Thread(target=self._reap, args=(self._ended,), daemon=True).start()
        return await asyncio.shield(asyncio.wrap_future(self._ended))

    def _reap(self, ended: Future[int]) -> None:
        code = self._process.wait()
        self.release()
        ended.set_result(code)

    def release(self) -> None:
        """Close its standard input, on which it ends by itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()


@contextmanager
def started_early() -> Iterator[Callable[[int], list[EngineProcess]]]:
    """One engine, importing while its parent reads its options; asked for more, others take its place.

    What is in the list at the end is ended.
    """
    engines = [EngineProcess()]

    def engines_of(count: int) -> list[EngineProcess]:
        if count != len(engines):  # the one there is would use the cores of all
            engines.pop().discard()
            engines.extend(EngineProcess(count) for _ in range(count))
        return engines

    try:
        yield engines_of
    finally:
        for engine in engines:
            engine.discard()


def _environment(num_engines: int) -> dict[str, str]:
    """The engine writes its log unbuffered, its threads do not spin for long, and several engines share them."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if num_engines > 1:
        environment["OMP_NUM_THREADS"] = str(threads_each(num_engines, os.environ))
    configure_omp_env(environment)
    bound_kernel_caches(environment)
    return environment
