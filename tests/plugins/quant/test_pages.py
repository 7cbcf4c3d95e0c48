"""Memory for packed matrices: pieces of slabs that lie apart and outlive whoever gave them out."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch

import fwk_native.huge_pages
from fwk_quant._linear_cpu.pages import ALIGNMENT, SLAB, HugePages


def test_pieces_lie_apart_and_keep_what_is_written() -> None:
    pages = HugePages()
    sizes = [(3, 5), (1,), (0, 7), (1000, 33), (SLAB // 4 + 1,), (2, 2)]
    pieces = [pages.empty(size, torch.int32) for size in sizes]
    del pages
    gc.collect()
    for number, piece in enumerate(pieces):
        assert piece.data_ptr() % ALIGNMENT == 0
        assert not piece.any()
        piece.fill_(number + 1)
    for number, (piece, size) in enumerate(zip(pieces, sizes, strict=True)):
        assert tuple(piece.shape) == size
        assert bool((piece == number + 1).all())


def test_pages_are_taken_ahead_from_the_second_slab_on(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, int]] = []

    def prefault_async(pieces: Sequence[torch.Tensor]) -> None:
        taken.extend((piece.data_ptr(), piece.numel()) for piece in pieces)

    monkeypatch.setattr(fwk_native.huge_pages, "prefault_async", prefault_async)
    pages = HugePages()
    pages.empty((SLAB // 2,), torch.uint8)
    pages.empty((SLAB // 2,), torch.uint8)
    assert not taken  # all that a tiny model needs
    piece = pages.empty((SLAB + 1,), torch.uint8)
    assert taken == [(piece.data_ptr(), SLAB + fwk_native.huge_pages.HUGE)]


def test_large_pieces_leave_the_slab_to_small_ones() -> None:
    pages = HugePages()
    small = pages.empty((64,), torch.uint8)
    for _ in range(3):
        pages.empty((SLAB,), torch.uint8)
        after = pages.empty((64,), torch.uint8)
        assert after.data_ptr() == small.data_ptr() + 64
        small = after
