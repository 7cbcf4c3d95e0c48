"""Processes as forks of one that has imported what they need, and whose memory they share.

The one that starts them has ``Forks`` and a ``ChildProcess`` for each, what they are forked from ``fork_on_demand``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from fwk_process.malloc import Heap
from fwk_process.parent import Adoption, continue_with_parent_gone, name_process

Start = Callable[[socket.socket], "subprocess.Popen[bytes]"]
"""Starts a process with this socket as its standard input, or one that forks it."""


class ChildProcess:
    """From its start to its end. It ends by itself when this process does, or lets go of it (``release``).

    adoption: where what ``start`` returns is a process that forks it, by which it becomes a child of this one.
    """

    def __init__(self, start: Start, adoption: Adoption | None = None) -> None:
        from concurrent.futures import Future  # noqa: PLC0415 - not before an early one has been started

        self.socket, theirs = socket.socketpair()
        self._adoption = adoption
        self._pid, self._ended = Future[int](), Future[int]()
        if adoption is not None:
            adoption.begin()
        with theirs:
            started = start(theirs)
        threading.Thread(target=self._follow, args=(started,), daemon=True).start()

    def _follow(self, started: subprocess.Popen[bytes]) -> None:
        """From its start to its end."""
        if self._adoption is None:
            pid = started.pid
        else:
            told = b""
            with contextlib.suppress(OSError):  # what was to fork it has ended with our line unread
                told = self.socket.recv(4)
            pid = int.from_bytes(told, sys.byteorder)
            self._adoption.end()
        self._pid.set_result(pid)
        try:
            self.forked()
        finally:  # whatever becomes of that, its end is told
            if self._adoption is not None and pid:
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            elif self._adoption is not None:
                started.kill()
                code = started.wait() or 1
            else:
                code = started.wait()
            self._ended.set_result(code)
            self.socket.close()

    def forked(self) -> None:
        """It is there, or never will be; called in a thread of its own."""

    @property
    def is_there(self) -> bool:
        """Whether there is a process, or was."""
        return self._pid.done()

    @property
    def pid(self) -> int:
        """Waits until there is a process; 0: there was none, as that which was to fork it has ended."""
        return self._pid.result()

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    def kill(self) -> None:
        """End it, also one that is stopped; one that is not forked yet, as soon as it is."""
        self.send_signal(signal.SIGKILL) if self.is_there else self.release()

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended."""
        if not self.has_ended and self.pid:
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
            self.socket.shutdown(socket.SHUT_WR)


class Forks:
    """The process that others are forked from. run: starts it, with the descriptor for its ``fork_on_demand``."""

    def __init__(self, run: Callable[[int], subprocess.Popen[bytes]]) -> None:
        self._run = run
        self._stays = True
        self._running: tuple[subprocess.Popen[bytes], socket.socket] | None = None  # and how it is told to

    def settle(self, *, stays: bool) -> None:
        """stays: whether the process waits for further ones; if not, each later one begins with imports."""
        self._stays = stays
        if not stays:
            self._let_go()

    def fork(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        """Have one forked that has this standard input (a ``Start``). Returns the process that forks it."""
        process, control = self._running or self.start()
        try:
            socket.send_fds(control, [b"\0"], [theirs.fileno()])
        except OSError:  # it has died
            self._let_go()
            process, control = self.start()
            socket.send_fds(control, [b"\0"], [theirs.fileno()])
        if not self._stays:
            self._let_go()
        return process

    def start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Start the process ahead."""
        control, other = socket.socketpair()
        with other:
            self._running = self._run(other.fileno()), control
        return self._running

    def _let_go(self) -> None:
        """It ends once it has forked what it was asked for."""
        if self._running is not None:
            process, control = self._running
            control.close()
            threading.Thread(target=process.wait, daemon=True).start()
            self._running = None

    def close(self) -> None:
        """End it; its forks continue."""
        if self._running is not None:
            self._running[0].kill()
            self._running[0].wait()
            self._let_go()


def fork_on_demand(descriptor: int, name: str, module: str) -> None:
    """Wait with all that is imported until the other end of a socket is closed. Returns in each fork alone.

    With a byte comes the descriptor of a fork's standard input, on which it says its number. It is a child of this
    process's parent, for the process between them ends. Threads are not forked, and what they hold stays locked: where
    there are any, a fork begins with its imports, as ``python -m module``. name: of this process in ``ps``.
    """
    name_process(name)
    Heap().trim()
    has_threads = len(os.listdir("/proc/self/task")) > 1
    with socket.socket(fileno=descriptor) as control:
        while True:
            message, inputs, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                os._exit(0)
            if (between := os.fork()) == 0:
                break
            os.waitpid(between, 0)
            os.close(inputs[0])
    between = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.0005)
    os.dup2(inputs[0], 0)
    os.close(inputs[0])
    os.write(0, os.getpid().to_bytes(4, sys.byteorder))
    if has_threads:
        os.execv(sys.executable, [sys.executable, "-P", "-m", module])
    continue_with_parent_gone()
