"""Engines as forks of one process that has imported what they need, and whose memory they share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fwk.server.engine_process import EngineProcess, run_engine
from fwk_process.forks import Forks
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
        self._forks = Forks(lambda passed: run_engine(ENGINE, num_engines, subprocess.DEVNULL, passed))
        if count and sys.platform == "linux":
            self._forks.start()
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
        """As ``Forks.settle``."""
        self._stays = stays
        self._forks.settle(stays=stays)

    def take(self) -> EngineProcess:
        """An engine that was begun, or another."""
        return self.begun.pop(0) if self.begun else self._new()

    def _new(self) -> EngineProcess:
        if sys.platform == "linux":
            return EngineProcess(self._forks.fork, self._adoption)
        return EngineProcess(lambda theirs: run_engine(ENGINE, self._num_engines, theirs))

    def close(self) -> None:
        """End what engines are forked from, and what was begun and not taken."""
        for other in self._others.values():
            other.close()
        self._forks.close()
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
