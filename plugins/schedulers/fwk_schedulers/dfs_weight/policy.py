"""The waiting prompts as a tree of prefixes, walked depth first, the heaviest branch first."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from itertools import pairwise, takewhile
from typing import Any

from fwk.interfaces.ranked_list import Ranked
from fwk.interfaces.schedule import ScheduleContext, SchedulePolicy, SchedulerView, SequenceView

_FIRST = 16
"""Tokens of the shortest prefix told apart; each further level of the tree is twice as long."""

_ROOT = 0


class DepthFirstByWeight(SchedulePolicy):
    """Pre-empted sequences first, then families of prompts that begin alike, the largest first."""

    def __init__(self, context: ScheduleContext) -> None:
        super().__init__(context)
        self._weights: Counter[int] = Counter()  # waiting sequences by prefix
        self._below: defaultdict[int, Ranked[Any]] = defaultdict(Ranked)  # longer prefixes, and sequences after them

    def order(self, waiting: Collection[SequenceView], view: SchedulerView) -> Iterator[SequenceView]:
        yield from takewhile(lambda sequence: sequence.num_preemptions > 0, waiting)
        yield from self._walk(_ROOT)

    def on_waiting(self, sequence: SequenceView, view: SchedulerView) -> None:
        self._change(_path(sequence), sequence, 1)

    def on_started(self, sequence: SequenceView, view: SchedulerView) -> None:
        self._change(_path(sequence), sequence, -1)

    def on_finished(self, sequence: SequenceView, view: SchedulerView) -> None:
        path = _path(sequence)
        if sequence in self._below.get(path[-1], ()):
            self._change(path, sequence, -1)

    def _walk(self, prefix: int) -> Iterator[SequenceView]:
        for item in self._below[prefix]:
            yield from self._walk(item) if isinstance(item, int) else (item,)

    def _change(self, path: list[int], sequence: SequenceView, by: int) -> None:
        for prefix in path:
            self._weights[prefix] += by
        items = [*pairwise(path), (path[-1], sequence)]
        for above, item in reversed(items):
            weight = self._weights[item] if isinstance(item, int) else max(by, 0)
            if weight:
                self._below[above].add(item, -weight)
            else:
                self._below[above].remove(item)
                self._weights.pop(item, None)
                if not self._below[above]:
                    del self._below[above]


def _path(sequence: SequenceView) -> list[int]:
    """A hash of each prefix of 16, 32, 64, ... tokens, after the root."""
    tokens, path, start, end = sequence.request.prompt_token_ids, [_ROOT], 0, _FIRST
    while end <= len(tokens):
        path.append(hash((path[-1], sequence.request.cache_namespace, *tokens[start:end])))
        start, end = end, 2 * end
    return path
