"""Groups of ranks that work on one thing together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class ParallelGroup(ABC):
    """A tensor-, data- or expert-parallel group. Layers call it; models and backends do not.

    Every rank gets the very same bits from a call: ranks sample by themselves and must choose the same tokens.
    """

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the group; may change ``x`` in place."""

    @abstractmethod
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Join the ranks' tensors along ``dim``, in rank order."""


class SingleRank(ParallelGroup):
    """The group of one."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x
