"""The waiting queue: order of arrival, pre-empted sequences first, removal in O(1)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from itertools import chain

from fwk.engine.sequence import Sequence


class WaitingQueue(Collection[Sequence]):
    """Sequences that wait for blocks, a slot or budget."""

    def __init__(self) -> None:
        self._preempted: OrderedDict[tuple[str, int], Sequence] = OrderedDict()
        self._fresh: OrderedDict[tuple[str, int], Sequence] = OrderedDict()

    def push(self, sequence: Sequence) -> None:
        """A sequence that has just arrived."""
        self._fresh[sequence.key] = sequence

    def push_back(self, sequence: Sequence) -> None:
        """A pre-empted sequence: before all others, among its like by arrival."""
        younger = [key for key, other in self._preempted.items() if other.order > sequence.order]
        self._preempted[sequence.key] = sequence
        for key in younger:
            self._preempted.move_to_end(key)

    def remove(self, sequence: Sequence) -> None:
        if self._preempted.pop(sequence.key, None) is None:
            del self._fresh[sequence.key]

    def __contains__(self, sequence: object) -> bool:
        return isinstance(sequence, Sequence) and (sequence.key in self._preempted or sequence.key in self._fresh)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._preempted.values(), self._fresh.values())

    def __len__(self) -> int:
        return len(self._preempted) + len(self._fresh)
