"""The rows of recurrent layers' states: one for each running sequence, and those kept for the prefix cache."""

from __future__ import annotations

from itertools import accumulate

import torch

from fwk.errors import ConfigError
from fwk.interfaces.parallel import ParallelGroup
from fwk.interfaces.state import RecurrentState
from fwk.types import Batch
from fwk.worker.kv.kv_cache import agree
from fwk_native import huge_pages

RUNNING_FRACTION = 0.5
"""Of the free memory: what states of running sequences take at most, unless the number of states is given."""

CACHE_FRACTION = 0.1
"""The same of states kept for the prefix cache."""


class StateStore:
    """Sequences' states by slot, after them ``num_places`` kept ones, and then those of before a step with drafts.

    A row is the states of all layers. On a CPU its pages are taken when it is first written to. A state cannot be cut
    back to an accepted draft. So it goes back to before the step when one was rejected, and the tokens that stand are
    computed again with the next ones.
    """

    def __init__(
        self, states: list[RecurrentState], num_slots: int, num_places: int, device: torch.device, num_undone: int = 0
    ) -> None:
        """num_undone: drafts are verified of sequences in so many slots, the first ones."""
        self.num_slots, self.num_places = num_slots, num_places
        self._first_undo = num_slots + num_places
        ends = list(accumulate((state.row_bytes for state in states), initial=0))
        self.row_bytes, num_rows = ends[-1], self._first_undo + num_undone
        size = num_rows * self.row_bytes
        is_host = device.type == "cpu"
        memory = huge_pages.zeros(size) if is_host else torch.zeros(size, dtype=torch.uint8, device=device)
        self._rows = memory.view(num_rows, self.row_bytes)
        for state, start, end in zip(states, ends, ends[1:], strict=False):
            state.bind(self._rows[:, start:end])

    @classmethod
    def allocate(
        cls,
        states: list[RecurrentState],
        *,
        num_slots: int,
        max_rows: int | None,
        is_cached: bool,
        device: torch.device,
        free: int,
        group: ParallelGroup,
        num_undone: int = 0,
    ) -> StateStore:
        """Rows for up to ``num_slots`` sequences, and for as many kept states: ``max_rows``, or what shares of the free
        memory hold.

        num_undone: rows more for drafts, which ``max_rows`` does not count.

        Raises ``ConfigError`` when there is no room for ``max_rows``, or for one sequence.
        """
        assert max_rows is None or max_rows >= num_slots, "each sequence needs a state"
        row_bytes = max(1, sum(state.row_bytes for state in states))
        if max_rows is None:
            room = int(RUNNING_FRACTION * free) // row_bytes
            fitting = min(num_slots, max(room - num_undone, room // 2 if num_undone else room))
            num_slots = agree(max(1, fitting), group, device)
            num_undone = min(num_undone, num_slots)
        num_rows = (num_slots if max_rows is None else max_rows) + num_undone
        if num_rows * row_bytes > free:
            raise ConfigError(
                f"{num_rows} states of recurrent layers need {num_rows * row_bytes / 2**20:.0f} MiB, but "
                f"{free / 2**20:.0f} MiB of memory are free: lower --max-running-requests, or keep fewer"
            )
        room = int(CACHE_FRACTION * free) // row_bytes
        num_places = (min(num_slots, room) if max_rows is None else max_rows - num_slots) if is_cached else 0
        return cls(states, num_slots, agree(num_places, group, device), device, num_undone)

    def sentence(self) -> str:
        """How many there are, and what they take once they are used."""
        size = self.row_bytes / 2**20
        return f"{self.num_slots} of sequences, {self.num_places} kept for prefixes, {size:.1f} MiB each once used"

    def begin(self, batch: Batch) -> None:
        """Give new sequences their states: zeros, or copies of kept ones."""
        for new in batch.new:
            if new.state_source < 0:
                self._rows[new.slot].zero_()
            else:
                self._copy(self.num_slots + new.state_source, new.slot)
        for scheduled in batch.sequences:
            if scheduled.draft_token_ids:
                self._copy(scheduled.slot, self._first_undo + scheduled.slot)

    def undo(self, slot: int) -> None:
        """Take a sequence's state back to before the step, which has drafts of it."""
        self._copy(self._first_undo + slot, slot)

    def save(self, batch: Batch) -> None:
        """Keep the states that the plan says, as the step has left them."""
        for scheduled in batch.sequences:
            if scheduled.state_place >= 0:
                self._copy(scheduled.slot, self.num_slots + scheduled.state_place)

    def _copy(self, source: int, target: int) -> None:
        self._rows[target] = self._rows[source]
