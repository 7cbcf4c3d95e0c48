"""Inputs of a step that a device gets in one copy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.helpers.pretend_cuda import JOURNAL, pretended
from tests.helpers.pretend_cuda.device import Pretended

from fwk.interfaces.device import DeviceContext
from fwk.worker.runner.packed import ALIGNMENT, PackedRing


@pytest.fixture
def ring() -> Iterator[PackedRing]:
    with pretended():
        device = Pretended(DeviceContext())
        made = PackedRing(device, device.take(0), 2)
        made.add("ids", (16,), torch.int64)
        made.add("lens", (16,), torch.int32)
        yield made
        assert JOURNAL.faults == []


def filled(ring: PackedRing, *arrays: np.ndarray) -> list[torch.Tensor]:
    ring.turn()
    return [ring.fill(name, array)[1] for name, array in zip(("ids", "lens"), arrays, strict=False)]


def test_all_that_was_filled_goes_in_one_copy(ring: PackedRing) -> None:
    ids, lens = filled(ring, np.arange(3), np.arange(5))
    assert sum(JOURNAL.copies.values()) == 0, "nothing is sent before all is there"
    ring.sent()
    assert list(JOURNAL.copies.values()) == [1]
    assert (ids.dtype, lens.dtype) == (torch.int64, torch.int32)
    assert (ids.tolist(), lens.tolist()) == ([0, 1, 2], [0, 1, 2, 3, 4])
    assert lens.data_ptr() % ALIGNMENT == ids.data_ptr() % ALIGNMENT


def test_what_comes_later_is_sent_by_itself(ring: PackedRing) -> None:
    (ids,) = filled(ring, np.arange(3))
    ring.sent()
    lens = ring.fill("lens", np.arange(5))[1]
    ring.sent()
    assert (ids.tolist(), lens.tolist()) == ([0, 1, 2], [0, 1, 2, 3, 4])
    ring.sent()
    assert sum(n for (kind, _), n in JOURNAL.copies.items() if "pinned" in kind) == 2, "nothing is sent twice"


def test_a_step_of_the_same_sizes_lies_where_it_lay(ring: PackedRing) -> None:
    """A captured step reads there."""
    first = [x.data_ptr() for x in filled(ring, np.arange(3), np.arange(5))]
    ring.sent()
    filled(ring, np.arange(4), np.arange(9))
    ring.sent()
    again = filled(ring, np.arange(3) + 7, np.arange(5))
    ring.sent()
    assert [x.data_ptr() for x in again] == first
    assert again[0].tolist() == [7, 8, 9]


def test_tokens_of_the_device_stay_there(ring: PackedRing) -> None:
    (lens,) = (filled(ring, np.arange(3), np.arange(5))[1],)
    drafted = ring.put("ids", torch.arange(4).to(lens.device))
    ring.sent()
    assert (drafted.tolist(), lens.tolist()) == ([0, 1, 2, 3], [0, 1, 2, 3, 4])
    assert ring.put("ids", drafted + 1).data_ptr() == drafted.data_ptr()


def test_sets_that_are_added_are_turned_to(ring: PackedRing) -> None:
    ring.grow(2)
    for step in range(6):
        (ids,) = filled(ring, np.full(3, step))
        ring.sent()
        assert ids.tolist() == [step] * 3
