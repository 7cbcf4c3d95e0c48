"""Admission by the most blocks that the running sequences and the new one will need at once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from fwk.interfaces.schedule import ScheduleContext, SchedulePolicy, SchedulerView, SequenceView
from fwk_schedulers.reserve import ReserveOptions


class ReserveRoom(SchedulePolicy):
    """Foresees outputs as long as they may become.

    All running sequences grow by a token a step, so the need is greatest just before one of them ends. One that ends
    gives back at least what it generated; its prompt may be another one's, too, and is not counted on.
    """

    def __init__(self, context: ScheduleContext) -> None:
        super().__init__(context)
        options: ReserveOptions = context.options or ReserveOptions()
        self._free_start = options.router_token_ratio
        self._max_output = options.router_max_new_token_len
        self._kept = options.scheduler_reserve_resource_ratio / 100
        self._running: set[SequenceView] = set()

    def order(self, waiting: Collection[SequenceView], view: SchedulerView) -> Iterator[SequenceView]:
        for sequence in waiting:
            num_running = view.num_running
            yield sequence
            if view.num_running > num_running:  # it has started: told only after the step has been planned
                self._running.add(sequence)

    def admit(self, sequence: SequenceView, num_blocks: int, view: SchedulerView) -> bool:
        free = view.num_free_blocks - int(self._kept * view.num_blocks)
        if num_blocks + view.num_reserved_blocks > free:
            return False
        if view.num_free_blocks >= (1 - self._free_start) * view.num_blocks:
            return True
        uncomputed = sequence.num_tokens - view.cached_prefix_len(sequence)
        prompts = max(num_blocks, -(-uncomputed // view.block_size))
        prompts += sum((other.num_tokens - other.num_computed_tokens) // view.block_size for other in self._running)
        outputs = (self._output(other) for other in (*self._running, sequence))
        return prompts + most_blocks(outputs, view.block_size) <= free

    def on_started(self, sequence: SequenceView, view: SchedulerView) -> None:
        self._running.add(sequence)

    def on_waiting(self, sequence: SequenceView, view: SchedulerView) -> None:
        self._running.discard(sequence)

    def on_finished(self, sequence: SequenceView, view: SchedulerView) -> None:
        self._running.discard(sequence)

    def _output(self, sequence: SequenceView) -> tuple[int, int]:
        """Tokens it may still generate, as far as is foreseen, and those it has generated."""
        generated = sequence.num_tokens - len(sequence.request.prompt_token_ids)
        return max(min(sequence.max_tokens, self._max_output) - generated, 1), generated


def most_blocks(outputs: Iterable[tuple[int, int]], block_size: int) -> int:
    """Blocks that sequences with these (tokens to come, tokens generated) need at once, beyond those they have."""
    most = given_back = 0
    waiting = sorted(outputs)
    for number, (steps, generated) in enumerate(waiting):
        growing = len(waiting) - number
        most = max(most, growing * -(-steps // block_size) - given_back)
        given_back += generated // block_size
    return most
