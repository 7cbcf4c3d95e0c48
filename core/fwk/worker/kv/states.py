"""The rows of recurrent layers' states: one for each running sequence, and those kept for the prefix cache."""

from __future__ import annotations

import torch

from fwk.errors import ConfigError
from fwk.interfaces.parallel import ParallelGroup
from fwk.interfaces.state import RecurrentState
from fwk.types import Batch
from fwk.worker.kv.kv_cache import agree

CACHE_FRACTION = 0.25
"""Of the free memory: what states kept for the prefix cache take at most, unless their number is given."""


class StateStore:
    """Sequences' states by slot, after them ``num_places`` kept ones, and then those of before a step with drafts.

    A state cannot be cut back to an accepted draft. So it goes back to before the step when one was rejected, and the
    tokens that stand are computed again with the next ones.
    """

    def __init__(
        self, states: list[RecurrentState], num_slots: int, num_places: int, device: torch.device, num_undone: int = 0
    ) -> None:
        """num_undone: drafts are verified of sequences in so many slots, the first ones."""
        self._states, self._num_slots, self.num_places = states, num_slots, num_places
        self._first_undo = num_slots + num_places
        for state in states:
            state.allocate(num_slots + num_places + num_undone, device)

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
        """Rows for ``num_slots`` sequences, and for as many kept states as ``max_rows`` or the free memory allow.

        num_undone: rows more for drafts, which ``max_rows`` does not count.

        Raises ``ConfigError`` when there is no room for the sequences.
        """
        if max_rows is not None and max_rows < num_slots:
            raise ConfigError(
                f"--max-mamba-cache-size {max_rows}: each of --max-running-requests {num_slots} needs a state; raise "
                "the one or lower the other"
            )
        row_bytes = max(1, sum(state.row_bytes for state in states))
        num_rows = (num_slots if max_rows is None else max_rows) + num_undone
        if num_rows * row_bytes > free:
            raise ConfigError(
                f"{num_rows} states of recurrent layers need {num_rows * row_bytes / 2**20:.0f} MiB, but "
                f"{free / 2**20:.0f} MiB of memory are free: lower --max-running-requests or --max-mamba-cache-size"
            )
        room = int(CACHE_FRACTION * (free - num_rows * row_bytes)) // row_bytes
        num_places = (min(num_slots, room) if max_rows is None else max_rows - num_slots) if is_cached else 0
        return cls(states, num_slots, agree(num_places, group, device), device, num_undone)

    def begin(self, batch: Batch) -> None:
        """Give new sequences their states: zeros, or copies of kept ones."""
        for new in batch.new:
            for state in self._states:
                for tensor in state.tensors.values():
                    if new.state_source < 0:
                        tensor[new.slot].zero_()
                    else:
                        tensor[new.slot] = tensor[self._num_slots + new.state_source]
        for scheduled in batch.sequences:
            if scheduled.draft_token_ids:
                self._copy(scheduled.slot, self._first_undo + scheduled.slot)

    def undo(self, slot: int) -> None:
        """Take a sequence's state back to before the step, which has drafts of it."""
        self._copy(self._first_undo + slot, slot)

    def _copy(self, source: int, target: int) -> None:
        for state in self._states:
            for tensor in state.tensors.values():
                tensor[target] = tensor[source]

    def save(self, batch: Batch) -> None:
        """Keep the states that the plan says, as the step has left them."""
        for scheduled in batch.sequences:
            if scheduled.state_place >= 0:
                for state in self._states:
                    for tensor in state.tensors.values():
                        tensor[self._num_slots + scheduled.state_place] = tensor[scheduled.slot]
