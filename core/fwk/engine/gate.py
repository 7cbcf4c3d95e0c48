"""What a sequence needs before its first step, prepared while others run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fwk.engine.sequence import Sequence

MAX_OPEN = 32
"""Sequences prepared for at once; those behind them in the queue wait for their turn."""

WAIT_SECONDS = 0.001


class Gate:
    """Asked before a waiting sequence starts. This one admits every sequence."""

    def poll(self) -> None:
        """A step is about to be planned: find out what has become ready."""

    def lets_through(self, sequence: Sequence) -> bool:
        """Whether the sequence could start now. If not, see to it that it can soon."""
        return True

    @property
    def is_full(self) -> bool:
        """Whether nothing can be prepared for more sequences now."""
        return False

    def started(self, sequence: Sequence) -> None:
        """The sequence is in the plan of a step."""

    def ended(self, sequence: Sequence) -> None:
        """The sequence ended while it waited."""

    def wait(self) -> None:
        """There is nothing to run: wait a moment, if it is for this gate."""


class PauseGate(Gate):
    """Holds back the sequences of requests whose ids are in ``paused``."""

    def __init__(self) -> None:
        self.paused: set[str] = set()

    def lets_through(self, sequence: Sequence) -> bool:
        return sequence.request.request_id not in self.paused


class GrammarGate(Gate):
    """Holds sequences back until every worker has compiled their grammars.

    ``call`` runs an operation on all workers (``Executor.call``). A grammar that is wrong counts as ready: the worker
    says so when the sequence starts.
    """

    def __init__(self, call: Callable[..., list[Any]]) -> None:
        self._call = call
        self._numbers: dict[Sequence, int] = {}
        self._ready: set[Sequence] = set()

    def poll(self) -> None:
        if len(self._ready) == len(self._numbers):
            return
        pending = [sequence for sequence in self._numbers if sequence not in self._ready]
        answers = self._call("grammars_ready", [self._numbers[sequence] for sequence in pending])
        self._ready.update(s for s, *ready in zip(pending, *answers, strict=True) if all(ready))

    def lets_through(self, sequence: Sequence) -> bool:
        grammar = sequence.request.sampling.grammar
        if grammar is None or sequence in self._ready:
            return True
        if sequence not in self._numbers and not self.is_full:
            self._numbers[sequence] = self._call("prepare_grammar", grammar.kind, grammar.source)[0]
            self.poll()  # it may have been compiled for another
        return sequence in self._ready

    @property
    def is_full(self) -> bool:
        return len(self._numbers) >= MAX_OPEN

    def started(self, sequence: Sequence) -> None:
        self._numbers.pop(sequence, None)
        self._ready.discard(sequence)

    def ended(self, sequence: Sequence) -> None:
        if sequence in self._numbers:
            self._call("release_grammar", self._numbers[sequence])
            self.started(sequence)

    def wait(self) -> None:
        if self._numbers:
            time.sleep(WAIT_SECONDS)
