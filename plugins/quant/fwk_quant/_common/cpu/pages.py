"""Pieces of huge pages for packed matrices: those of a small model are smaller than a page, and share it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from fwk import pages

if TYPE_CHECKING:
    from torch import Tensor

SLAB = 32 << 20
"""Bytes that are asked for at a time."""

ALIGNMENT = 64


class HugePages:
    """Gives out pieces of slabs, which live as long as any tensor on them does."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros at a multiple of ``ALIGNMENT`` bytes."""
        size = math.prod(shape) * dtype.itemsize
        room = -(-size // ALIGNMENT) * ALIGNMENT
        if room > len(self._slab):
            # What is left of the slab before was never touched, so it takes address space only.
            self._slab = pages.zeros(max(SLAB, -(-room // pages.HUGE) * pages.HUGE))
        piece, self._slab = self._slab[:size], self._slab[room:]
        return piece.view(dtype).view(shape)
