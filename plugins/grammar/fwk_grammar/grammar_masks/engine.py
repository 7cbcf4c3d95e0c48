"""The part in the engine."""

from __future__ import annotations

import time

from fwk.interfaces.feature import EnginePart, EnginePartContext, FeatureSequence
from fwk.types import Request

MAX_OPEN = 32
"""Sequences whose grammars are compiled at once; those behind them in the queue wait for their turn."""

WAIT_SECONDS = 0.001


class GrammarGate(EnginePart):
    """Holds sequences back until every worker has compiled their grammars.

    A grammar that is wrong counts as ready: the worker says so when the sequence starts.
    """

    def __init__(self, context: EnginePartContext) -> None:
        super().__init__(context)
        self._numbers: dict[FeatureSequence, int] = {}
        self._ready: set[FeatureSequence] = set()

    def concerns(self, request: Request) -> bool:
        return request.sampling.grammar is not None

    def poll(self) -> None:
        if len(self._ready) == len(self._numbers):
            return
        pending = [sequence for sequence in self._numbers if sequence not in self._ready]
        answers = self.context.call("ready", [self._numbers[sequence] for sequence in pending])
        self._ready.update(s for s, *ready in zip(pending, *answers, strict=True) if all(ready))

    def lets_through(self, sequence: FeatureSequence) -> bool:
        if sequence not in self._numbers and not self.is_full:
            grammar = sequence.request.sampling.grammar
            assert grammar is not None
            self._numbers[sequence] = self.context.call("prepare", grammar.kind, grammar.source)[0]
            self.poll()  # it may have been compiled for another
        return sequence in self._ready

    @property
    def is_full(self) -> bool:
        """Those that are ready do not count: they may stand behind the one that asks."""
        return len(self._numbers) - len(self._ready) >= MAX_OPEN

    def started(self, sequence: FeatureSequence) -> None:
        self._numbers.pop(sequence, None)
        self._ready.discard(sequence)

    def ended(self, sequence: FeatureSequence) -> None:
        if sequence in self._numbers:
            self.context.call("release", self._numbers[sequence])
            self.started(sequence)

    def wait(self) -> None:
        if self._numbers:
            time.sleep(WAIT_SECONDS)
