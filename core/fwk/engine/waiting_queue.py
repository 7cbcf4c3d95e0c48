"""The waiting queue: in the order of the ranks the policy gave, however long it is."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from fwk.engine.sequence import Sequence
from fwk.interfaces.ranked_list import Ranked


class WaitingQueue(Collection[Sequence]):
    """Sequences that wait for blocks, a slot or budget: lowest rank first, among equals by arrival."""

    def __init__(self) -> None:
        self._ranked: Ranked[Sequence] = Ranked()

    def push(self, sequence: Sequence, rank: Any) -> None:
        """A sequence that has arrived, or is back after a pre-emption."""
        self._ranked.add(sequence, rank, sequence.order)

    def remove(self, sequence: Sequence) -> None:
        self._ranked.remove(sequence)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._ranked

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._ranked)

    def __len__(self) -> int:
        return len(self._ranked)
