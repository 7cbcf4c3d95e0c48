"""Groups of ranks that work on one thing together."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

PR_SET_PDEATHSIG = 1
"""Linux's number of the request to prctl, from its headers."""


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


def continue_with_parent_gone() -> None:
    """On Linux: have the system continue this process, should it be stopped, when its parent dies.

    It then sees that its leash is gone, and cleans up and ends; one that is not stopped notices nothing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
