"""An engine process of ours, from its start to its end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from fwk.interfaces.parallel import threads_each
from fwk_process.crash import HANGS
from fwk_process.kernel_caches import bound_kernel_caches
from fwk_process.parent import Adoption, terminal_signals_blocked
from fwk_process.threads import configure_omp_env

if TYPE_CHECKING:
    from fwk.engine.process import LaunchSpec


class EngineProcess:
    """Imports what every engine needs or has it, and loads the model once it is told which (``tell``).

    It ends by itself when this process does, or lets go of it. start: starts it with a socket as its standard input.
    adoption: where what ``start`` returns is a process that forks it, by which it becomes a child of this one.
    """

    def __init__(
        self, start: Callable[[socket.socket], subprocess.Popen[bytes]], adoption: Adoption | None = None
    ) -> None:
        from concurrent.futures import Future  # noqa: PLC0415 - not before an early engine has been started

        from fwk_native.memory import MemoryPrefaulter  # noqa: PLC0415

        self._socket, theirs = socket.socketpair()
        self._adoption = adoption
        self._pid, self._ended = Future[int](), Future[int]()
        self._memory = MemoryPrefaulter()
        self.model_bytes = 0
        """What the model's files hold, where that is known before it is told what to load."""
        if adoption is not None:
            adoption.begin()
        with theirs:
            started = start(theirs)
        threading.Thread(target=self._follow, args=(started,), daemon=True).start()

    def _follow(self, started: subprocess.Popen[bytes]) -> None:
        """From its start to its end."""
        if self._adoption is None:
            self._pid.set_result(started.pid)
            code = started.wait()
        else:
            told = b""
            with contextlib.suppress(OSError):  # what was to fork it has ended with our line unread
                told = self._socket.recv(4)
            pid = int.from_bytes(told, sys.byteorder)
            self._adoption.end()
            self._pid.set_result(pid)
            self._memory.give_back()
            if pid:
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            else:
                started.kill()
                code = started.wait() or 1
        self._ended.set_result(code)
        self._socket.close()

    def tell(self, spec: LaunchSpec) -> None:
        """What to load and where to meet. One that has died already is told in vain.

        Until it has been forked, memory is taken ahead: what blocks hold in four bits or eight are numbers of up to
        sixteen.
        """
        import msgspec  # noqa: PLC0415 - as in __init__

        if not self._pid.done():
            self._memory.take(2 * self.model_bytes)
        with contextlib.suppress(OSError):
            self._socket.sendall(msgspec.json.encode(spec) + b"\n")

    @property
    def pid(self) -> int:
        """Waits until there is a process; 0: there was none, as that which was to fork it has ended."""
        return self._pid.result()

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    def kill(self) -> None:
        """End it, also one that is stopped; one that is not forked yet, as soon as it is."""
        self._signal(signal.SIGKILL) if self._pid.done() else self.release()

    def write_stack(self) -> None:
        """Have it note where it is (``fwk_process.crash``), unless it is stopped."""
        self._signal(HANGS)

    def _signal(self, number: int) -> None:
        if not self._ended.done() and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def discard(self) -> None:
        """End it for good, where no event loop runs."""
        self.kill()
        self._ended.result()

    async def wait(self) -> int:
        """Its exit code, once it has ended; a signal's number is negative."""
        import asyncio  # noqa: PLC0415 - as in __init__

        return await asyncio.shield(asyncio.wrap_future(self._ended))

    def release(self) -> None:
        """Close its standard input, on which it ends by itself."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)


def run_engine(
    module: str, num_engines: int, stdin: socket.socket | int, passed: int | None = None
) -> subprocess.Popen[bytes]:
    """A module of an engine as a process, which has the descriptor ``passed`` and is told its number."""
    passes = [] if passed is None else [passed]
    command = [sys.executable, "-P", "-m", module, *map(str, passes)]  # -P: no code from the current directory
    number = stdin if isinstance(stdin, int) else stdin.fileno()
    with terminal_signals_blocked():
        return subprocess.Popen(command, stdin=number, env=_environment(num_engines), pass_fds=passes)


def _environment(num_engines: int) -> dict[str, str]:
    """The engine writes its log unbuffered, its threads do not spin for long, and several engines share them."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if num_engines > 1:
        environment["OMP_NUM_THREADS"] = str(threads_each(num_engines, os.environ))
    configure_omp_env(environment)
    bound_kernel_caches(environment)
    return environment
