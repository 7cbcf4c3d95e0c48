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


class Stage:
    """Which of a model's layers a worker computes: those of stage ``index`` of ``count``, one after another.

    This one is the only stage, with all layers. Calls of one stage to another meet in the order in which they are made.
    """

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether it embeds the tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the norm after the last layer and the LM head, and chooses tokens."""
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """Its layers of a model's: consecutive ones, where they cannot be divided evenly more in the earlier stages."""
        first, end = (-(-num_layers * index // self.count) for index in (self.index, self.index + 1))
        return range(first, end)

    def send_hidden(self, x: Tensor) -> None:
        """Hand what the layers of this stage made, [num_tokens, hidden_size], to the next; waits for nothing."""
        raise NotImplementedError("there is one stage only")

    def receive_hidden(self, x: Tensor) -> Tensor:
        """Wait for what the stage before made, of the shape of ``x``, which is filled and returned."""
        raise NotImplementedError("there is one stage only")

    def send_tokens(self, token_ids: Tensor) -> None:
        """From the last stage to the first: what was chosen in a step, [n] int64; waits for nothing."""
        raise NotImplementedError("there is one stage only")

    def receive_tokens(self, count: int) -> Tensor:
        """In the first stage: wait for the tokens of the oldest step whose tokens have not come, [count] int64."""
        raise NotImplementedError("there is one stage only")


class ParallelGroup(ABC):
    """A tensor-, data- or expert-parallel group. Layers call it; models and backends do not.

    Every rank gets the very same bits from a call: ranks sample by themselves and must choose the same tokens.

    - ``rank``: of this worker in the group, from 0.
    - ``size``: ranks in the group.
    - ``collective``: torch.distributed's backend for tensors of the ranks' devices; a worker sets it before the first
      call.
    - ``stage``: the layers that the ranks of a tensor-parallel group share.
    """

    rank: int
    size: int
    collective: str = "gloo"
    stage: Stage = Stage()

    @property
    def everyone(self) -> ParallelGroup:
        """The ranks of all stages."""
        return self

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
