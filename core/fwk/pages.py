"""Memory of the CPU in huge pages, where the system has any.

What a step reads in order, weights and cached keys, is far more than a cache holds. With pages of 4 KiB the
prefetchers stop at the end of each, and the core waits for as many translations of addresses.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

HUGE = 2 << 20
"""Bytes of a huge page on x86, and on Arm where pages have 4 KiB."""


def zeros(num_bytes: int) -> Tensor:
    """[num_bytes] uint8 from a multiple of ``HUGE`` on.

    They take no memory before they are written to, and then a huge page at a time; small pages, where the system has
    no huge ones left or was told to give none (``/sys/kernel/mm/transparent_hugepage/enabled``).
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE
    return whole[start : start + num_bytes]
