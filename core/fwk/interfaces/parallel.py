"""Groups of ranks that work on one thing together."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def threads_each(num_processes: int, environment: Mapping[str, str]) -> int:
    """Threads for the kernels of each of several processes that share what this one may use.

    That is ``OMP_NUM_THREADS`` of its environment, or else its cores.
    """
    given = environment.get("OMP_NUM_THREADS", "")
    if given.isdecimal():
        available = int(given)
    else:
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, available // num_processes)


class ParallelGroup(ABC):
    """A tensor-, data- or expert-parallel group. Layers call it; models and backends do not.

    Every rank gets the very same bits from a call: ranks sample by themselves and must choose the same tokens.

    - ``rank``: of this worker in the group, from 0.
    - ``size``: ranks in the group.
    - ``collective``: torch.distributed's backend for tensors of the ranks' devices; a worker sets it before the first
      call.
    """

    rank: int
    size: int
    collective: str = "gloo"

    @property
    def local_rank(self) -> int:
        """Position among the ranks on this machine, which take its devices in this order."""
        return self.rank

    @property
    def local_size(self) -> int:
        """Ranks on this machine, which share its cores and memory."""
        return self.size

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the group, of any shape; may change ``x`` in place."""

    @abstractmethod
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Join the ranks' tensors, of one shape, along ``dim``, in rank order."""


class SingleRank(ParallelGroup):
    """The group of one."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x
