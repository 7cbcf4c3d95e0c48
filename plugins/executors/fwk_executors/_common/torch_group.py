"""A group of ranks over torch.distributed, with the library that the ranks' device asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.interfaces.parallel import ParallelGroup

if TYPE_CHECKING:
    from torch import Tensor


class TorchGroup(ParallelGroup):
    """All ranks of this process's world. They meet through the file ``store`` at the first call, by which time
    all of them must have been started; the file may go when that call has returned.

    Both libraries add in an order that does not depend on the rank and hand the sum round, so ranks agree to the bit.
    """

    def __init__(self, rank: int, size: int, store: str) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._is_connected = False

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        import torch.distributed as dist  # noqa: PLC0415 - whoever never calls this needs no torch

        self._connect()
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        if self.size == 1:
            return x
        import torch  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415

        self._connect()
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x)
        return torch.cat(parts, dim)

    def _connect(self) -> None:
        if self._is_connected:
            return
        import torch.distributed as dist  # noqa: PLC0415
        from torch._C._distributed_c10d import FileStore  # noqa: PLC0415

        dist.init_process_group(
            self.collective,
            store=FileStore(self._store, self.size),
            rank=self.rank,
            world_size=self.size,
        )
        self._is_connected = True
