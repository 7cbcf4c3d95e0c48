"""Memory of the CPU in huge pages, where the system has any.

What a step reads in order, weights and cached keys, is far more than a cache holds. With pages of 4 KiB the
prefetchers stop at the end of each, and the core waits for as many translations of addresses.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fwk_native.memory import HUGE, advise, populate


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


@contextmanager
def discard_writes(memory: Tensor) -> Iterator[None]:
    """What is written meanwhile to ``memory``, whole ``zeros``, is forgotten: at the end they are zeros again.

    Writing takes small pages, so that a few bytes here and there cost no huge ones.
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(memory, mmap.MADV_NOHUGEPAGE)
    try:
        yield
    finally:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            _advise(memory, mmap.MADV_DONTNEED)
            _advise(memory, mmap.MADV_HUGEPAGE)
        else:
            memory.zero_()


def prefault_async(pieces: Sequence[Tensor]) -> threading.Thread:
    """Begin to take the huge pages that pieces of ``zeros`` lie in, alongside what this thread does.

    The system clears a page when it is first written to, and a virtual machine may have to ask its host for it: half a
    second for 200 MB has been seen. Nothing happens where the system cannot do it ahead (Linux before 5.14).
    """
    spans = [(piece.data_ptr(), piece.numel() * piece.element_size()) for piece in pieces]
    thread = threading.Thread(target=_populate, args=(spans, pieces), daemon=True)
    thread.start()
    return thread


def _populate(spans: list[tuple[int, int]], alive: Sequence[Tensor]) -> None:
    """alive: what the spans lie in."""
    for address, size in spans:
        end = address + size
        for page in range(address // HUGE * HUGE, end, HUGE):  # one at a time: who maps memory meanwhile waits for it
            start = max(page, address)
            populate(start, min(page + HUGE, end) - start)


def _advise(memory: Tensor, advice: int) -> None:
    advise(memory.data_ptr(), memory.numel() * memory.element_size(), advice)
