"""One rank: what runs in a Ray actor. Arguments and answers are msgpack, which Ray carries as bytes."""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

import ray
from fwk.errors import FwkError
from fwk.interfaces.executor import Worker, WorkerInfo, WorkerRecipe
from fwk.types import Batch, StepResult
from fwk_executors._common.answers import Failed, digest, failure
from fwk_executors._common.interfaces import find_interface
from fwk_executors._common.torch_group import NetworkStore, Position, TorchGroup, World


class Start(msgspec.Struct, frozen=True):
    """What a rank is, and what it makes its worker of.

    address: of its node, as the other ranks reach it. environment: settings of its threads.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    store: NetworkStore
    recipe: WorkerRecipe
    environment: dict[str, str]


class Place(msgspec.Struct, frozen=True):
    """Where Ray has put a rank."""

    node_id: str
    pid: int


class Loaded(msgspec.Struct, tag=True, frozen=True):
    info: WorkerInfo


class Ran(msgspec.Struct, tag=True, frozen=True):
    """A step's result; ranks agree on it, so only rank 0 sends more than its digest."""

    digest: int
    result: StepResult | None


class Called(msgspec.Struct, tag=True, frozen=True):
    result: object


Answer = Loaded | Ran | Called | Failed

_ENCODER = msgspec.msgpack.Encoder()
_BATCHES: msgspec.msgpack.Decoder[Batch] = msgspec.msgpack.Decoder(Batch)


class RankActor:
    """Calls are done one after another, in the order in which the engine made them. None of them raises."""

    def __init__(self) -> None:
        self._rank = 0
        self._worker: Worker | None = None

    def place(self) -> bytes:
        return _ENCODER.encode(Place(ray.get_runtime_context().get_node_id(), os.getpid()))

    def load(self, start: bytes) -> bytes:
        """Make the worker, and load it."""
        try:
            return _ENCODER.encode(Loaded(self._load(msgspec.msgpack.decode(start, type=Start))))
        except Exception as error:
            return _failed(error, is_refusal=isinstance(error, FwkError))

    def _load(self, start: Start) -> WorkerInfo:
        for name, value in {**_interfaces(start.address), **start.environment}.items():
            os.environ.setdefault(name, value)
        self._rank = start.rank
        position = Position(start.rank, start.size, start.local_rank, start.local_size)
        self._worker = start.recipe.make(TorchGroup(World(position, start.store)))
        return self._worker.load()

    def execute(self, batch: bytes) -> bytes:
        try:
            assert self._worker is not None
            result = self._worker.execute(_BATCHES.decode(batch))
            return _ENCODER.encode(Ran(digest(result), None if self._rank else result))
        except Exception as error:
            return _failed(error, is_refusal=False)

    def call(self, job: bytes) -> bytes:
        try:
            assert self._worker is not None
            name, arguments = msgspec.msgpack.decode(job, type=tuple[str, list[object]])
            return _ENCODER.encode(Called(self._worker.call(name, *arguments)))
        except Exception as error:
            return _failed(error, is_refusal=isinstance(error, FwkError))

    def ping(self) -> None:
        """Answered by one that lives."""

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


def _failed(error: Exception, *, is_refusal: bool) -> bytes:
    return _ENCODER.encode(failure(0, error, is_refusal=is_refusal))


def _interfaces(address: str) -> Mapping[str, str]:
    """That of the address at which other nodes know this one, for collectives."""
    interface = find_interface(address)
    return {} if interface is None else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
