"""A group of ranks over torch.distributed, with the library that the ranks' device asks for."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from fwk.interfaces.parallel import ParallelGroup

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store

LOADING = timedelta(hours=24)
"""What a rank that has loaded waits for one that loads: the engine ends both if that one dies."""

COLLECTIVES = timedelta(minutes=30)
"""torch's own limit: the engine's, for a step, ends ranks earlier."""


class NetworkStore(msgspec.Struct, tag=True, frozen=True):
    """Where ranks of several machines find each other: a TCPStore, in which all their keys begin with a secret.

    timeout: seconds in which they must reach each other, once all have loaded.
    """

    host: str
    port: int
    prefix: str
    timeout: float


@contextmanager
def serve_store(address: str, timeout: float) -> Iterator[NetworkStore]:
    """Have the calling process serve a store at a free port of an address, and of no other, until the end."""
    from torch._C._distributed_c10d import TCPStore  # noqa: PLC0415

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        port = listener.getsockname()[1]
        seconds = timedelta(seconds=timeout)
        served = TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=seconds, master_listen_fd=listener.detach()
        )
    yield NetworkStore(address, port, secrets.token_hex(16), timeout)
    del served


@dataclass(frozen=True, slots=True)
class Position:
    """A rank among all, and among those on its machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int


class TorchGroup(ParallelGroup):
    """All ranks of this process's world. They meet in the store at the first call, by which time all of them must have
    been started; it may go when that call has returned. store: a file's name, or that of several machines.

    Both libraries add in an order that does not depend on the rank and hand the sum round, so ranks agree to the bit.
    """

    def __init__(self, position: Position, store: str | NetworkStore) -> None:
        self.rank = position.rank
        self.size = position.size
        self._position = position
        self._store = store
        self._is_connected = False

    @property
    def local_rank(self) -> int:
        return self._position.local_rank

    @property
    def local_size(self) -> int:
        return self._position.local_size

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

        if isinstance(self._store, str):
            store = FileStore(self._store, self.size)
            dist.init_process_group(self.collective, store=store, rank=self.rank, world_size=self.size)
        else:
            self._connect_machines(self._store)
        self._is_connected = True

    def _connect_machines(self, where: NetworkStore) -> None:
        import torch.distributed as dist  # noqa: PLC0415
        from torch._C._distributed_c10d import PrefixStore, TCPStore  # noqa: PLC0415
        from torch.distributed.distributed_c10d import _set_pg_timeout  # noqa: PLC0415

        timeout = timedelta(seconds=where.timeout)
        opened = TCPStore(where.host, where.port, is_master=False, wait_for_workers=False, timeout=timeout)
        store: Store = PrefixStore(where.prefix, opened)
        store.set(f"loaded/{self.rank}", "")
        store.wait([f"loaded/{rank}" for rank in range(self.size)], LOADING)
        dist.init_process_group(self.collective, store=store, rank=self.rank, world_size=self.size, timeout=timeout)
        _set_pg_timeout(COLLECTIVES)
