"""Memory in huge pages."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from fwk import pages
from fwk.interfaces.attention import AttentionLayer, BlockFormat
from fwk.worker.kv_cache import ALIGNMENT, allocate


@pytest.mark.skipif(sys.platform != "linux", reason="as Linux tells of pages")
def test_the_system_is_asked_for_huge_pages() -> None:
    piece = pages.zeros(5)
    assert piece.tolist() == [0] * 5
    assert piece.data_ptr() % pages.HUGE == 0
    with open("/proc/self/smaps", encoding="ascii") as file:
        lines = iter(file.read().splitlines())
    flags, is_ours = "", False
    for line in lines:
        first, _, rest = line.partition(" ")
        if "-" in first and rest:
            start, end = (int(x, 16) for x in first.split("-"))
            is_ours = start <= piece.data_ptr() < end
        elif first == "VmFlags:" and is_ours:
            flags = rest
    assert "hg" in flags.split()


class Odd:
    """Blocks of a few bytes."""

    def block_format(self, spec: Any) -> BlockFormat:
        return BlockFormat((3, 1), torch.int16)


def test_caches_of_layers_lie_one_after_another() -> None:
    layers = [AttentionLayer(i, 1, 1, 8, 1.0) for i in range(3)]
    allocate(Odd(), layers, 7, torch.device("cpu"))  # type: ignore[arg-type]
    caches = [layer.kv_cache for layer in layers]
    for number, cache in enumerate(caches):
        assert tuple(cache.shape) == (7, 3, 1)
        assert not cache.any()
        cache.fill_(number + 1)
    assert [cache.unique().tolist() for cache in caches] == [[1], [2], [3]]
    places = [cache.data_ptr() for cache in caches]
    assert [place - places[0] for place in places] == [0, ALIGNMENT, 2 * ALIGNMENT]
