"""Servers and ranks as forks of a process that has imported what they would: a start costs a third of the CPU.

A fork has the arguments, environment, folder, standard streams and parent that a process of its own would have, and
imports what the zygote has not. Not the same are its command line in /proc, the memory it shares, and that its API
process maps torch: tests of these, and of what is read before the first import, start a process of their own.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fwk_executors.processes import rank
from fwk_process.threads import spin_briefly

PR_SET_CHILD_SUBREAPER = 36
"""Linux's number of the request to prctl, from its headers: orphans below become this process's children."""

ENGINE = "fwk.engine.process"
MODULES = (
    *("fwk.server.serve", "fwk.cli.common", "fwk.engine.node", "fwk.engine.loop", "fwk.worker.remote"),
    *("fwk_grammar.llguidance.sources", "fwk_parsers._common.bare", "prometheus_client", "pydantic.v1", "uvloop"),
)
"""What a server imports after its plugins' declarations, besides the dialects and what an engine on a model does."""

OF_ITS_OWN = (
    *(
        "PROBE_FILE",
        "PYTHONPATH",
        "PYTHONUNBUFFERED",
        "TMPDIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "GLOO_SOCKET_IFNAME",
        "PYTEST_CURRENT_TEST",
        "TQDM_DISABLE",
    ),
)
"""Variables that nothing has read before a fork sees its own."""


spin_briefly(os.environ)  # as the first use of fwk's public names does, in some fixture or other
AT_FIRST = dict(os.environ)
"""Variables before the first test."""


class Forked(subprocess.Popen[bytes]):
    """A child that is there already, with the state that ``Popen`` has once it has started one."""

    def __init__(self, pid: int) -> None:
        vars(self).update(
            pid=pid, args=f"fork {pid}", returncode=None, stdin=None, stdout=None, stderr=None, _input=None
        )
        vars(self).update(_child_created=True, _communication_started=False, _waitpid_lock=threading.Lock())


class Zygote:
    """``start`` takes what a process of its own would be given.

    environment: its own, whatever a test has set while it is made.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment, self._lock = environment, threading.Lock()
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._begin()

    def _begin(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", __file__, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                env=self._environment,
            )

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Whether what it has imported would be the same in such an environment."""
        return not self.differing(environment)

    def differing(self, environment: Mapping[str, str]) -> list[str]:
        """The variables for which it would not."""
        ours = self._environment
        return [name for name in {*ours, *environment} - {*OF_ITS_OWN} if ours.get(name) != environment.get(name)]

    def start(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        log: int = 2,
        passed: Sequence[int] = (),
        output: int = 1,
    ) -> subprocess.Popen[bytes]:
        """``python -P -m`` with these words, as a child of this process.

        log: its standard error. passed: descriptors that it has, too; words that are their numbers say its own.
        output: its standard output.
        """
        asked = {"words": words, "environment": dict(environment), "folder": os.getcwd(), "parent": os.getpid()}
        message = json.dumps(asked | {"passed": passed}).encode()
        with self._lock:
            return Forked(
                self._fork(message, [output, log, *passed]) or self._fork_anew(message, [output, log, *passed])
            )

    def _fork(self, message: bytes, descriptors: list[int]) -> int:
        """Its number; 0 if the zygote has ended."""
        with adopting_orphans(), contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._control, [message], descriptors)
            return int(self._control.recv(64) or 0)
        return 0

    def _fork_anew(self, message: bytes, descriptors: list[int]) -> int:
        """Of another zygote, and say why; tests that come later are not to fail for what ended the first."""
        self._end()
        self._log.seek(0)
        said = f"the zygote ended with {self._process.returncode}: {self._log.read()[-2000:]}"
        warnings.warn(said, stacklevel=3)  # which the run's summary tells
        self._begin()
        if found := self._fork(message, descriptors):
            return found
        raise RuntimeError(f"the second time, too, {said}")

    def _end(self) -> None:
        self._control.close()
        self._process.wait()

    def close(self) -> None:
        self._end()
        self._log.close()


@cache
def zygote() -> Zygote:
    """This process's, from the first that it forks until its end."""
    found = Zygote(AT_FIRST)
    atexit.register(found.close)
    return found


def open_fwk(*words: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[Any]:
    """``python -m fwk`` with these words, whose standard error is a pipe of text; a fork where that may be one."""
    environment = environment if environment is not None else os.environ
    if not zygote().serves(environment):
        command = [sys.executable, "-m", "fwk", *words]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, text=True)
    reading, writing = os.pipe()
    try:
        process: subprocess.Popen[Any] = zygote().start(["fwk", *words], environment, writing)
    finally:
        os.close(writing)
    process.stderr = os.fdopen(reading)
    return process


def run_fwk(
    *words: str, environment: Mapping[str, str] | None = None, seconds: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """The same to its end: its exit code and what it printed."""
    environment = environment if environment is not None else os.environ
    if not zygote().serves(environment):
        command = [sys.executable, "-m", "fwk", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment, check=False)
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as log:
        process = zygote().start(["fwk", *words], environment, log.fileno(), output=output.fileno())
        try:
            code = process.wait(seconds)
        finally:
            process.kill()
        for file in (output, log):
            file.seek(0)
        return subprocess.CompletedProcess(words, code, output.read(), log.read())


def fork_ranks() -> None:
    """Have engines within this process start ranks so."""
    rank.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": start_rank})  # type: ignore[assignment]


def start_rank(command: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int], stdin: int) -> Any:
    if not zygote().serves(env):
        return subprocess.Popen(command, env=env, pass_fds=pass_fds, stdin=stdin)
    return zygote().start(command[3:], env, passed=pass_fds)


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def main(control: socket.socket) -> int:
    """The zygote, and in each fork what it is there for."""
    import fwk_server

    dialects = [module.name for module in pkgutil.walk_packages(fwk_server.__path__, "fwk_server.")]
    for name in (ENGINE, *MODULES, *(point.module for point in entry_points(group="fwk")), *dialects):
        importlib.import_module(name)
    keep_what_forks_make()
    gc.collect()
    gc.freeze()
    while True:
        asked, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 8)
        if not asked:
            return 0
        look_for_plugins(json.loads(asked)["environment"].get("PYTHONPATH", ""))
        if os.fork() == 0:
            if os.fork():
                os._exit(0)  # which leaves the other to the tests' process
            become(json.loads(asked), descriptors, control)
        os.wait()
        for descriptor in descriptors:
            os.close(descriptor)


def keep_what_forks_make() -> None:
    """Plugins, what the routes of all dialects read and answer with, and all that an engine makes once."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    kept = importlib.import_module("tests.helpers.discovered")
    del sys.path[0]
    kept.discover_once(*map(importlib.import_module, (ENGINE, "fwk.cli.common", "fwk.worker.remote")))
    kept.share_adapters()
    kept.make_ahead()
    run_engine()


def path_of(python_path: str) -> list[str]:
    """``sys.path`` with this before it."""
    first = [folder for folder in python_path.split(os.pathsep) if folder]
    return [*first, *(folder for folder in sys.path if folder not in first)]


@cache
def look_for_plugins(python_path: str) -> None:
    """Where those of ``tests/faults/plugin`` are the only further ones, as for nearly all of the servers of the rig."""
    if python_path.split(os.pathsep)[1:] == [str(Path(__file__).parents[1] / "faults/plugin")]:
        before, sys.path[:] = [*sys.path], path_of(python_path)
        importlib.import_module("fwk.cli.common").discover()
        sys.path[:] = before


def run_engine() -> None:
    """One on a tiny model, to its end."""
    import fwk
    from fwk_kit.testing.serving import TINY

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY))
        with fwk.LLM(folder, load_format="dummy", device="cpu", max_total_tokens=512, check_blocks=True) as llm:
            llm.generate([[1, 2, 3]], fwk.SamplingParams(max_tokens=2))
    threads, end = Path("/proc/self/task"), time.monotonic() + 30
    while len(left := [_name_of(each) for each in threads.iterdir()]) > 1:
        assert time.monotonic() < end, f"a fork has no threads but its own, not {left}"
        time.sleep(0.01)  # on a busy machine a thread that was joined is seen for a while


def _name_of(thread: Path) -> str:
    try:
        return thread.joinpath("comm").read_text().strip()
    except OSError:
        return "one that has ended"


def become(asked: Mapping[str, Any], descriptors: Sequence[int], control: socket.socket) -> None:
    """What was asked for."""
    while os.getppid() != asked["parent"]:
        time.sleep(0.001)
    for number, descriptor in enumerate(descriptors[:2], 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    control.send(str(os.getpid()).encode())
    control.close()
    os.chdir(asked["folder"])
    settle(asked["environment"])
    sys.path[:] = path_of(asked["environment"].get("PYTHONPATH", ""))
    ours = dict(zip(map(str, asked["passed"]), map(str, descriptors[2:]), strict=True))
    words: list[str] = asked["words"][1:]
    sys.argv[1:] = [ours.get(word, word) for word in words]
    setattr(importlib.import_module("fwk.server.engine_process"), "subprocess", ENGINES)  # noqa: B010
    setattr(importlib.import_module("fwk.server.served_model"), "warm_up", lambda *_: None)  # noqa: B010
    os._exit(ended(partial(runpy.run_module, asked["words"][0], run_name="__main__", alter_sys=True)))


def settle(environment: Mapping[str, str]) -> None:
    """What was read of another environment is read again."""
    os.environ.clear()
    os.environ.update(environment)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through="PYTHONUNBUFFERED" in environment)  # type: ignore[union-attr]
    tempfile.tempdir = None
    importlib.invalidate_caches()


def start_engine(command: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int], **settings: Any) -> Any:
    """What engines are forked from, as a fork; a process of its own once there are threads, which a fork has not."""
    if command[-2] != ENGINE or len(os.listdir("/proc/self/task")) > 1:
        return subprocess.Popen(command, env=env, pass_fds=pass_fds, **settings)
    if pid := os.fork():
        return Forked(pid)
    for number in [int(name) for name in os.listdir("/proc/self/fd")]:
        if number > 2 and number not in pass_fds:
            with contextlib.suppress(OSError):
                os.close(number)
    settle(env)
    sys.argv[1:] = command[-1:]
    engine = importlib.import_module(ENGINE)
    os._exit(ended(lambda: sys.exit(engine.main())))


ENGINES = SimpleNamespace(Popen=start_engine)
"""What the module that starts engines has of ``subprocess``."""


def ended(run: Callable[[], object]) -> int:
    """The exit code of a process that does this alone, and does not take its modules apart: 0.4 s of CPU."""
    try:
        run()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    sys.exit(main(socket.socket(fileno=int(sys.argv[1]))))
