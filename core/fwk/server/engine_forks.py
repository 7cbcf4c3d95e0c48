"""Engines as forks of one process that has imported what they need, and whose memory they share."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fwk.server.engine_process import EngineProcess, run_engine
from fwk_process.parent import Adoption

ENGINE = "fwk.engine.process"


class EngineForks:
    """Engines of this machine, of which ``num_engines`` share its cores. ``count`` of them are begun at once.

    Where a process cannot be forked safely (elsewhere than on Linux), each imports for itself.
    """

    def __init__(self, num_engines: int = 1, count: int = 0, adoption: Adoption | None = None) -> None:
        self._num_engines = num_engines
        self._adoption = adoption or Adoption()
        self._others: dict[int, EngineForks] = {}
        self._stays = True
        self._running: tuple[subprocess.Popen[bytes], socket.socket] | None = None  # what forks, and how it is told to
        if count and sys.platform == "linux":
            self._start()
        self.begun = [self._new() for _ in range(count)]
        """Those that have not been taken yet."""

    def of(self, num_engines: int) -> EngineForks:
        """The same for so many engines, whose threads share the cores in another way."""
        if num_engines == self._num_engines:
            return self
        if num_engines not in self._others:
            self._others[num_engines] = EngineForks(num_engines, adoption=self._adoption)
            self._others[num_engines].settle(stays=self._stays)
        return self._others[num_engines]

    def settle(self, *, stays: bool) -> None:
        """stays: whether the process waits for further engines; if not, each later one begins with imports."""
        self._stays = stays
        if not stays:
            self._let_go()

    def take(self) -> EngineProcess:
        """An engine that was begun, or another."""
        return self.begun.pop(0) if self.begun else self._new()

    def _new(self) -> EngineProcess:
        if sys.platform == "linux":
            return EngineProcess(self._fork, self._adoption)
        return EngineProcess(lambda theirs: run_engine(ENGINE, self._num_engines, theirs))

    def _fork(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        """Have an engine forked that has this standard input. Returns the process that forks it."""
        process, control = self._running or self._start()
        try:
            socket.send_fds(control, [b"\0"], [theirs.fileno()])
        except OSError:  # it has died
            self._let_go()
            process, control = self._start()
            socket.send_fds(control, [b"\0"], [theirs.fileno()])
        if not self._stays:
            self._let_go()
        return process

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        control, other = socket.socketpair()
        with other:
            self._running = run_engine(ENGINE, self._num_engines, subprocess.DEVNULL, other.fileno()), control
        return self._running

    def _let_go(self) -> None:
        """It ends once it has forked what it was asked for."""
        if self._running is not None:
            process, control = self._running
            control.close()
            threading.Thread(target=process.wait, daemon=True).start()
            self._running = None

    def close(self) -> None:
        """End it, and what was begun and not taken."""
        for other in self._others.values():
            other.close()
        if self._running is not None:
            self._running[0].kill()
            self._running[0].wait()
            self._let_go()
        while self.begun:
            self.begun.pop().discard()


@contextmanager
def started_early() -> Iterator[Callable[[int], EngineForks]]:
    """One engine, importing while its parent reads its options; asked for more, others take its place.

    What has not been taken at the end is ended, and the process that they were forked from.
    """
    forks = [EngineForks(count=1)]

    def engines_of(count: int) -> EngineForks:
        if count != 1:  # the one there is would use the cores of all
            forks.pop().close()
            forks.append(EngineForks(count, count))
        return forks[0]

    try:
        yield engines_of
    finally:
        forks[0].close()
