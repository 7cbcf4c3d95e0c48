"""Memory in huge pages."""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import pytest
import torch

from fwk.interfaces.attention import AttentionLayer, BlockFormat
from fwk.interfaces.device import DeviceContext
from fwk.worker.kv.kv_cache import allocate, scratch_kv_cache
from fwk_devices.cpu.device import ALIGNMENT, Cpu
from fwk_native import huge_pages

DEVICE = (Cpu(DeviceContext()), torch.device("cpu"))


@pytest.mark.skipif(sys.platform != "linux", reason="as Linux tells of pages")
def test_the_system_is_asked_for_huge_pages() -> None:
    piece = huge_pages.zeros(5)
    assert piece.tolist() == [0] * 5
    assert piece.data_ptr() % huge_pages.HUGE == 0
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
    allocate(Odd(), [layers], 7, *DEVICE)  # type: ignore[arg-type]
    caches = [layer.kv_cache for layer in layers]
    for number, cache in enumerate(caches):
        assert tuple(cache.shape) == (7, 3, 1)
        assert not cache.any()
        cache.fill_(number + 1)
    assert [cache.unique().tolist() for cache in caches] == [[1], [2], [3]]
    places = [cache.data_ptr() for cache in caches]
    assert [place - places[0] for place in places] == [0, ALIGNMENT, 2 * ALIGNMENT]


def resident(x: torch.Tensor) -> list[bool]:
    """Of each small page that ``x`` lies in, whether it has memory."""
    start = x.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    count = -(-(x.data_ptr() + x.numel() * x.element_size() - start) // mmap.PAGESIZE)
    told = (ctypes.c_ubyte * count)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(count * mmap.PAGESIZE), told) == 0
    return [bool(byte & 1) for byte in told]


def test_what_is_forgotten_is_zeros_and_takes_no_memory() -> None:
    memory = huge_pages.zeros(3 * huge_pages.HUGE + 5)
    memory[:2] = 1
    with huge_pages.discard_writes(memory):
        memory[7] = memory[-1] = 3
        assert memory[-1] == 3
    if sys.platform == "linux":
        assert not any(resident(memory))
    assert not memory.any()


def can_take_ahead() -> bool:
    """Whether this Linux knows MADV_POPULATE_WRITE."""
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), 23) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux takes pages ahead")
def test_pages_are_taken_before_they_are_written_to() -> None:
    if not can_take_ahead():
        pytest.skip("Linux takes pages ahead from 5.14 on")
    memory = huge_pages.zeros(4 * huge_pages.HUGE)
    memory[5] = 9
    first, last = memory[: huge_pages.HUGE + 1], memory[3 * huge_pages.HUGE + 5 :]
    huge_pages.prefault_async([first, last]).join()
    assert all(resident(first))
    assert all(resident(last))
    assert not any(resident(memory[2 * huge_pages.HUGE : 3 * huge_pages.HUGE]))
    assert memory[5] == 9
    assert memory.count_nonzero() == 1


@pytest.mark.parametrize("has_memory", [True, False])
def test_a_cache_that_was_not_used_yet_is_zeros(has_memory: bool) -> None:
    layers = [AttentionLayer(i, 1, 1, 8, 1.0) for i in range(3)]
    memory = allocate(Odd(), [layers], 7, *DEVICE)  # type: ignore[arg-type]
    with scratch_kv_cache(memory if has_memory else None, layers):
        for layer in layers:
            assert layer.kv_cache is not None
            layer.kv_cache[2] = 5
    left = 0 if has_memory else 5  # elsewhere than on a CPU it is left to be overwritten
    assert [int(layer.kv_cache[2].max()) for layer in layers if layer.kv_cache is not None] == [left] * 3
