"""The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), with weights."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator
from itertools import islice

from fwk.interfaces.ranked_list import Groups
from fwk.interfaces.schedule import ScheduleContext, SchedulePolicy, SchedulerView, SequenceView
from fwk.types import tenant_of
from fwk_schedulers.fair import MAX_REMEMBERED, MAX_STARTING, FairOptions, read_weights


class FairShare(SchedulePolicy):
    """Counts tokens by tenant, over its weight; whoever has used least is next, its own requests by arrival.

    A tenant that was idle is lifted to the least of those that wait: nobody saves up, and nobody is punished for having
    used what nobody else wanted.
    """

    def __init__(self, context: ScheduleContext) -> None:
        super().__init__(context)
        options: FairOptions = context.options or FairOptions()
        self._cost = options.fair_share_output_cost
        self._weights = {tenant_of(key): weight for key, weight in read_weights(options.fair_share_weights).items()}
        self._used: dict[str, float] = {}
        self._waiting: Groups[str, SequenceView] = Groups()  # tenants by what they have used
        self._charged: dict[SequenceView, float] = {}  # those that have started

    def order(self, waiting: Collection[SequenceView], view: SchedulerView) -> Iterator[SequenceView]:
        for sequence in self._charged:
            self._charge(sequence)
        heap = [(self._used[t], t, iter(self._waiting.get(t))) for t in islice(self._waiting, MAX_STARTING)]
        while heap:
            used, tenant, mine = heap[0]
            if (sequence := next(mine, None)) is None:
                heapq.heappop(heap)
                continue
            yield sequence
            heapq.heapreplace(heap, (used + sequence.num_tokens / self._weights.get(tenant, 1.0), tenant, mine))

    def on_waiting(self, sequence: SequenceView, view: SchedulerView) -> None:
        tenant = sequence.request.service.tenant
        if len(self._used) > MAX_REMEMBERED:
            self._used = {tenant: self._used[tenant] for tenant in self._waiting}
        if tenant not in self._waiting:
            self._used[tenant] = max(self._used.get(tenant, 0.0), next((self._used[t] for t in self._waiting), 0.0))
        self._waiting.add(tenant, sequence, (sequence.num_preemptions == 0, sequence.arrival), self._used[tenant])

    def on_started(self, sequence: SequenceView, view: SchedulerView) -> None:
        self._charged.setdefault(sequence, 0.0)
        self._waiting.discard(sequence.request.service.tenant, sequence)

    def on_finished(self, sequence: SequenceView, view: SchedulerView) -> None:
        self._waiting.discard(sequence.request.service.tenant, sequence)
        self._charge(sequence)
        self._charged.pop(sequence, None)

    def _charge(self, sequence: SequenceView) -> None:
        """Count what a sequence has come to since it was counted last."""
        tenant, num_prompt = sequence.request.service.tenant, len(sequence.request.prompt_token_ids)
        cost = num_prompt + self._cost * (sequence.num_tokens - num_prompt)
        news = (cost - self._charged.get(sequence, cost)) / self._weights.get(tenant, 1.0)
        self._charged[sequence], self._used[tenant] = cost, self._used.get(tenant, 0.0) + news
        self._waiting.rank(tenant, self._used[tenant])
