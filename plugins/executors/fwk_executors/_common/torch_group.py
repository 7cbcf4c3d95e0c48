"""A group of ranks over torch.distributed, with the library that the ranks' device asks for."""

from __future__ import annotations

import secrets
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from fwk.interfaces.parallel import ParallelGroup, Stage

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup, Work

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
    """A rank among all, and among those on its machine. num_stages: that share all ranks evenly, in their order."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    num_stages: int = 1

    @property
    def stage_size(self) -> int:
        """Ranks in a stage."""
        return self.size // self.num_stages


class World:
    """All ranks, each a process. They meet in the store at the first call, by which time all of them must have
    been started; it may go when that call has returned. store: a file's name, or that of several machines.
    """

    def __init__(self, position: Position, store: str | NetworkStore) -> None:
        self.position = position
        self.collective = "gloo"
        self._store = store
        self._is_connected = False
        self._stages: list[ProcessGroup | None] = [None] * position.num_stages

    def connect(self) -> None:
        """Meet the others, unless that is done."""
        if self._is_connected:
            return
        self._connect()
        self._is_connected = True
        num, size = self.position.num_stages, self.position.stage_size
        if 1 < num < self.position.size:
            import torch.distributed as dist  # noqa: PLC0415

            for stage in range(num):  # every rank makes them all
                made = dist.new_group(list(range(stage * size, (stage + 1) * size)))
                self._stages[stage] = made if isinstance(made, dist.ProcessGroup) else None

    def stage_group(self) -> ProcessGroup | None:
        """The ranks of this rank's stage; None: all."""
        self.connect()
        return self._stages[self.position.rank // self.position.stage_size]

    def _connect(self) -> None:
        import torch.distributed as dist  # noqa: PLC0415
        from torch._C._distributed_c10d import FileStore  # noqa: PLC0415

        rank, size = self.position.rank, self.position.size
        if isinstance(self._store, str):
            store = FileStore(self._store, size)
            dist.init_process_group(self.collective, store=store, rank=rank, world_size=size)
        else:
            self._connect_machines(self._store)

    def _connect_machines(self, where: NetworkStore) -> None:
        import torch.distributed as dist  # noqa: PLC0415
        from torch._C._distributed_c10d import PrefixStore, TCPStore  # noqa: PLC0415
        from torch.distributed.distributed_c10d import _set_pg_timeout  # noqa: PLC0415

        rank, size = self.position.rank, self.position.size
        timeout = timedelta(seconds=where.timeout)
        opened = TCPStore(where.host, where.port, is_master=False, wait_for_workers=False, timeout=timeout)
        store: Store = PrefixStore(where.prefix, opened)
        store.set(f"loaded/{rank}", "")
        store.wait([f"loaded/{other}" for other in range(size)], LOADING)
        dist.init_process_group(self.collective, store=store, rank=rank, world_size=size, timeout=timeout)
        _set_pg_timeout(COLLECTIVES)


class TorchGroup(ParallelGroup):
    """The ranks of a stage, or of all stages.

    The libraries add in an order that does not depend on the rank and hand the sum round, so ranks agree to the bit.
    """

    def __init__(self, world: World, *, is_everyone: bool = False) -> None:
        self._world = world
        self._is_everyone = is_everyone
        position = world.position
        self.size = position.size if is_everyone else position.stage_size
        self.rank = position.rank % self.size
        if position.num_stages > 1:
            self.stage = TorchStage(world)

    @property
    def everyone(self) -> TorchGroup:
        if self._is_everyone or self.stage.count == 1:
            return self
        everyone = TorchGroup(self._world, is_everyone=True)
        everyone.collective = self.collective
        return everyone

    @property
    def local_rank(self) -> int:
        return self._world.position.local_rank

    @property
    def local_size(self) -> int:
        return self._world.position.local_size

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        import torch.distributed as dist  # noqa: PLC0415 - whoever never calls this needs no torch

        x = x.contiguous()
        dist.all_reduce(x, group=self._connected())
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        if self.size == 1:
            return x
        import torch  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415

        group = self._connected()
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=group)
        return torch.cat(parts, dim)

    def _connected(self) -> ProcessGroup | None:
        self._world.collective = self.collective
        if not self._is_everyone:
            return self._world.stage_group()
        self._world.connect()
        return None


class TorchStage(Stage):
    """The stage of a rank, whose neighbours are the ranks of the same place in the stages before and after it.

    What is sent is kept until it has been taken; nothing waits for that, so that a stage computes its next step
    meanwhile.
    """

    def __init__(self, world: World) -> None:
        self.index, self.count = world.position.rank // world.position.stage_size, world.position.num_stages
        self._world = world
        self._sending: deque[tuple[Work, Tensor]] = deque()

    def send_hidden(self, x: Tensor) -> None:
        self._send(x, self.index + 1)

    def receive_hidden(self, x: Tensor) -> Tensor:
        return self._receive(x, self.index - 1)

    def send_tokens(self, token_ids: Tensor) -> None:
        self._send(token_ids, 0)

    def receive_tokens(self, count: int) -> Tensor:
        import torch  # noqa: PLC0415

        return self._receive(torch.empty(count, dtype=torch.int64), self.count - 1)

    def _send(self, x: Tensor, stage: int) -> None:
        import torch.distributed as dist  # noqa: PLC0415

        self._world.connect()
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()[0].wait()  # raises what went wrong
        x = x.contiguous()
        work = dist.isend(x, self._rank(stage))
        assert work is not None, "every rank is in the group of all"
        self._sending.append((work, x))

    def _receive(self, x: Tensor, stage: int) -> Tensor:
        import torch.distributed as dist  # noqa: PLC0415

        self._world.connect()
        dist.recv(x, self._rank(stage))
        return x

    def _rank(self, stage: int) -> int:
        size = self._world.position.stage_size
        return stage * size + self._world.position.rank % size
