"""Memory of recurrent layers' states: taken as sequences come, and as many as fit."""

import resource

import pytest
import torch

from fwk.errors import ConfigError
from fwk.interfaces.parallel import SingleRank
from fwk.interfaces.state import RecurrentState
from fwk.types import Batch, NewSequence, SamplingParams
from fwk.worker.kv.states import StateStore

GIB, MIB = 2**30, 2**20
CPU = torch.device("cpu")


class Layers:
    """As much of a ``ModelContext`` as layers tell their states to."""

    def __init__(self, count: int, shape: tuple[int, ...]) -> None:
        self.recurrent_states: list[RecurrentState] = []
        for _ in range(count):
            shapes = {"conv": (3, 5), "sum": shape}
            RecurrentState(self, shapes, {"conv": torch.bfloat16, "sum": torch.float32})  # type: ignore[arg-type]


def store(free: int, *, max_rows: int | None = None, num_undone: int = 0) -> tuple[StateStore, list[RecurrentState]]:
    """Of 256 sequences, with some 16 MiB each."""
    states = Layers(4, (1024, 1024)).recurrent_states
    made = StateStore.allocate(
        states,
        num_slots=256,
        max_rows=max_rows,
        is_cached=True,
        device=CPU,
        free=free,
        group=SingleRank(),
        num_undone=num_undone,
    )
    return made, states


def test_states_take_memory_when_sequences_come() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made, states = store(16 * GIB)
    assert (made.num_slots, made.num_places) == (256, 102)
    assert "256 of sequences, 102 kept for prefixes, 16.0 MiB each" in made.sentence()
    made.begin(Batch(1, [], [NewSequence(slot, [5], 1, 0, [], SamplingParams(), 0) for slot in (0, 255)], []))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 100 << 10, "rows that no sequence has were written to"
    states[3].tensors["sum"][255] = 1
    assert not states[3].tensors["sum"][0].any()
    assert states[0].tensors["conv"].shape == (358, 3, 5)


@pytest.mark.parametrize(
    ("free", "num_undone", "slots", "places"),
    [(GIB, 0, 31, 6), (GIB, 16, 15, 6), (GIB // 4, 16, 3, 1), (40 * MIB, 0, 1, 0)],
)
def test_as_many_sequences_run_as_half_of_the_memory_holds(free: int, num_undone: int, slots: int, places: int) -> None:
    made, _ = store(free, num_undone=num_undone)
    assert (made.num_slots, made.num_places) == (slots, places)


@pytest.mark.parametrize(("free", "max_rows"), [(10 * MIB, None), (GIB, 256)])
def test_no_room_is_refused(free: int, max_rows: int | None) -> None:
    with pytest.raises(ConfigError, match="states of recurrent layers need"):
        store(free, max_rows=max_rows)
