"""What a sequence needs before its first step, prepared while others run."""

from __future__ import annotations

import time

from fwk.engine.sequence import Sequence
from fwk.interfaces.feature import Gate
from fwk.interfaces.prefix_cache import PrefixCache

MAX_OPEN = 32
"""Sequences prepared for at once; those behind them in the queue wait for their turn."""

WAIT_SECONDS = 0.001

ASK_SECONDS = 0.002


def rest() -> None:
    """Nothing can be computed yet: let a little time pass."""
    time.sleep(WAIT_SECONDS)


class PauseGate(Gate):
    """Holds back the sequences of requests whose ids are in ``paused``."""

    def __init__(self) -> None:
        self.paused: set[str] = set()

    def lets_through(self, sequence: Sequence) -> bool:
        return sequence.request.request_id not in self.paused


class CacheGate(Gate):
    """Holds sequences back while the prefix cache brings nearer what it keeps of their tokens."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._tickets: dict[Sequence, int | None] = {}
        self._pending: dict[Sequence, int] = {}
        self._asked_at = 0.0

    def arrived(self, sequence: Sequence) -> None:
        if not self.is_full and sequence not in self._tickets:
            tokens = sequence.token_ids[: sequence.num_matchable_tokens]
            ticket = self._cache.prepare(sequence.request.cache_namespace, tokens)
            self._tickets[sequence] = ticket
            if ticket is not None and not all(self._cache.are_prepared([ticket])):
                self._pending[sequence] = ticket

    def poll(self) -> None:
        """Asking ends the overlap of two steps: not in every one."""
        now = time.monotonic()
        if not self._pending or now < self._asked_at + ASK_SECONDS:
            return
        self._asked_at = now
        are_prepared = self._cache.are_prepared(list(self._pending.values()))
        for sequence, is_prepared in zip(list(self._pending), are_prepared, strict=True):
            if is_prepared:
                del self._pending[sequence]

    def lets_through(self, sequence: Sequence) -> bool:
        self.arrived(sequence)
        return sequence in self._tickets and sequence not in self._pending

    @property
    def is_full(self) -> bool:
        return len(self._pending) >= MAX_OPEN

    def started(self, sequence: Sequence) -> None:
        self._pending.pop(sequence, None)
        ticket = self._tickets.pop(sequence, None)
        if ticket is not None:
            self._cache.leave(ticket)

    def ended(self, sequence: Sequence) -> None:
        self.started(sequence)

    def wait(self) -> None:
        if self._pending:
            rest()
