"""The rows of recurrent layers' states: one for each running sequence, and those kept for the prefix cache."""

from __future__ import annotations

import psutil
import torch

from fwk.errors import ConfigError
from fwk.interfaces.parallel import ParallelGroup
from fwk.interfaces.state import RecurrentState
from fwk.types import Batch
from fwk.worker.kv_cache import agree

CACHE_FRACTION = 0.25
"""Of the free memory: what states kept for the prefix cache take at most, unless their number is given."""


class StateStore:
    """Sequences' states by slot, and after them ``num_places`` kept ones."""

    def __init__(self, states: list[RecurrentState], num_slots: int, num_places: int, device: torch.device) -> None:
        self._states, self._num_slots, self.num_places = states, num_slots, num_places
        for state in states:
            state.allocate(num_slots + num_places, device)

    @classmethod
    def allocate(
        cls,
        states: list[RecurrentState],
        *,
        num_slots: int,
        max_rows: int | None,
        is_cached: bool,
        device: torch.device,
        group: ParallelGroup,
        num_replicas: int,
    ) -> StateStore:
        """Rows for ``num_slots`` sequences, and for as many kept states as ``max_rows`` or the free memory allow.

        Raises ``ConfigError`` when there is no room for the sequences.
        """
        if max_rows is not None and max_rows < num_slots:
            raise ConfigError(
                f"--max-mamba-cache-size {max_rows}: each of --max-running-requests {num_slots} needs a state; raise "
                "the one or lower the other"
            )
        row_bytes = max(1, sum(state.row_bytes for state in states))
        if device.type == "cpu":
            free = psutil.virtual_memory().available // (group.size * num_replicas)
        else:
            free = torch.cuda.mem_get_info(device)[0]
        num_rows = num_slots if max_rows is None else max_rows
        if num_rows * row_bytes > free:
            raise ConfigError(
                f"{num_rows} states of recurrent layers need {num_rows * row_bytes / 2**20:.0f} MiB, but "
                f"{free / 2**20:.0f} MiB of memory are free: lower --max-running-requests or --max-mamba-cache-size"
            )
        room = int(CACHE_FRACTION * (free - num_rows * row_bytes)) // row_bytes
        num_places = (min(num_slots, room) if max_rows is None else max_rows - num_slots) if is_cached else 0
        return cls(states, num_slots, agree(num_places, group, device), device)

    def begin(self, batch: Batch) -> None:
        """Give new sequences their states: zeros, or copies of kept ones."""
        for new in batch.new:
            for state in self._states:
                for tensor in state.tensors.values():
                    if new.state_source < 0:
                        tensor[new.slot].zero_()
                    else:
                        tensor[new.slot] = tensor[self._num_slots + new.state_source]

    def save(self, batch: Batch) -> None:
        """Keep the states that the plan says, as the step has left them."""
        for scheduled in batch.sequences:
            if scheduled.state_place >= 0:
                for state in self._states:
                    for tensor in state.tensors.values():
                        tensor[self._num_slots + scheduled.state_place] = tensor[scheduled.slot]
