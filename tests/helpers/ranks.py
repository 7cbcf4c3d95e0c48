"""Ranks without processes."""

from __future__ import annotations

from torch import Tensor

from fwk.interfaces.parallel import ParallelGroup


class Rank(ParallelGroup):
    """One rank whose collectives leave its own part to the test."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x
