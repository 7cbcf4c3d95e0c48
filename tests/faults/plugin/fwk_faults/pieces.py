"""A policy, a sampler and a logits processor that fail on request."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor

from fwk.interfaces.sampling import LogitsProcessor, LogitsView, Sampler, SamplingContext, SamplingRows
from fwk.interfaces.schedule import ScheduleContext, SchedulePolicy, SchedulerView, SequenceView
from fwk.types import SamplingParams
from fwk_faults import Fault, asked
from fwk_sampling.torch_sampler.sampler import TorchSampler

SEEDS = 666_000
"""A request with seed SEEDS + k has the sampler raise at its k-th token."""


class FaultyPolicy(SchedulePolicy):
    """First come, first served. Raises when it is asked about a request's chunk for the k-th time."""

    def __init__(self, context: ScheduleContext) -> None:
        super().__init__(context)
        self._turns: dict[str, int] = {}

    def order(self, waiting: Collection[SequenceView], view: SchedulerView) -> Iterable[SequenceView]:
        return waiting

    def chunk(self, sequence: SequenceView, remaining: int, budget: int, view: SchedulerView) -> int:
        fault = asked(sequence.request.sampling.extra, "policy")
        if fault is not None:
            turn = self._turns.get(sequence.request.request_id, 0) + 1
            self._turns[sequence.request.request_id] = turn
            if turn == fault[1]:
                raise Fault
        return min(remaining, budget)


class FaultySampler(Sampler):
    """The torch sampler, but for some seeds."""

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        self._sampler = TorchSampler(context)
        self._turns: dict[int, int] = {}

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        for seed in rows.seeds.tolist():
            if SEEDS < seed < SEEDS + 1000:
                self._turns[seed] = self._turns.get(seed, 0) + 1
                if self._turns[seed] == seed - SEEDS:
                    raise Fault
        return self._sampler.sample(logits, rows)


class Favour(LogitsProcessor):
    """Lets one token through."""

    def add(self, slot: int, params: SamplingParams) -> bool:
        return True

    def remove(self, slot: int) -> None:
        """Nothing is kept."""

    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        logits.fill_(-float("inf"))[:, self.context.options.favour_token] = 0.0
        return logits


class FaultyProcessor(LogitsProcessor):
    """Changes nothing. Raises in ``add``, ``remove``, or in ``apply`` for the k-th output token of a request."""

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        self._asked: dict[int, tuple[str, int]] = {}

    def add(self, slot: int, params: SamplingParams) -> bool:
        fault = asked(params.extra, "add", "apply", "remove", "memory")
        if fault is None:
            return False
        if fault[0] == "add":
            raise Fault
        self._asked[slot] = fault
        return True

    def remove(self, slot: int) -> None:
        if self._asked.pop(slot)[0] == "remove":
            raise Fault

    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        num_output = (view.num_tokens - view.num_prompt_tokens).tolist()
        for slot, done in zip(view.slots.tolist(), num_output, strict=True):
            place, turn = self._asked.get(slot, ("", 0))
            if place in ("apply", "memory") and done + 1 >= turn:
                raise Fault if place == "apply" else MemoryError
        return logits
