"""Pieces of huge pages for packed matrices: those of a small model are smaller than a page, and share it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from fwk_native import huge_pages

if TYPE_CHECKING:
    from torch import Tensor

SLAB = 16 << 20
"""Bytes that are asked for at a time, and whose pages are taken ahead of what is written."""

ALIGNMENT = 64


class HugePages:
    """Gives out pieces of slabs, which live as long as any tensor on them does."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._has_slab = False

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros at a multiple of ``ALIGNMENT`` bytes."""
        size = math.prod(shape) * dtype.itemsize
        room = -(-size // ALIGNMENT) * ALIGNMENT
        slab = self._slab if room <= len(self._slab) else self._new(room)
        piece, rest = slab[:size], slab[room:]
        if slab is self._slab or len(rest) > len(self._slab):  # the larger rest is kept: large matrices leave none
            self._slab = rest
        return piece.view(dtype).view(shape)

    def _new(self, room: int) -> Tensor:
        size = -(-room // huge_pages.HUGE) * huge_pages.HUGE if 2 * room > SLAB else SLAB
        slab = huge_pages.zeros(size)
        if self._has_slab:  # the first one a tiny model would not fill
            huge_pages.prefault_async([slab])
        self._has_slab = True
        return slab
