"""The device that a worker computes on: what it has, what it takes by itself, and how the host meets it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fwk.interfaces.declaration import Declaration, Host

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from fwk.interfaces.graphs import GraphCapture


@dataclass(frozen=True, slots=True)
class DeviceContext:
    """What a device is built with.

    - ``options``: the plugin's own options, validated; None where it declares none.
    """

    options: Any = None


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes: what is free for this worker, and what ``--mem-fraction-static`` is a fraction of.

    - ``free``: bytes now.
    - ``total``: bytes of all.
    """

    free: int
    total: int


@dataclass(frozen=True, slots=True)
class Taken:
    """Bytes that the device's allocator has taken for this process: now, and at most since ``Device.trim``.

    - ``now``: bytes.
    - ``most``: bytes.
    """

    now: int
    most: int


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """What a run takes unless it is said.

    dtype: of weights and activations. why: a sentence when that is not the checkpoint's own.
    memory_fraction: of ``MemoryInfo.total``, for weights and K/V.
    step_tokens: a step computes at most so many. start_tokens: a step that starts prompts of so many starts no more;
        None: as long as they fit.
    decode_gap: a step with prompts takes at most so many times one in which all that run and wait only decode; None:
        no bound.
    """

    dtype: str
    memory_fraction: float
    step_tokens: int
    start_tokens: int | None = None
    why: str | None = None
    decode_gap: float | None = None


class Event(ABC):
    """A mark in the order of a device's work."""

    @abstractmethod
    def record(self) -> None:
        """Mark the end of everything given to the device so far. Does not wait; the mark before is forgotten."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the device has come to the mark; at once when none was recorded."""


class NoEvent(Event):
    """Of a device that has done its work when the call returns."""

    def record(self) -> None:
        pass

    def wait(self) -> None:
        pass


class Staging(ABC):
    """Buffers on the device, filled from the host's memory without waiting for the steps that still read there."""

    @abstractmethod
    def add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """A buffer of zeros; one of that name before it is given up."""

    @abstractmethod
    def turn(self) -> None:
        """Before the first ``fill`` of a step: returns when the host's memory may be written to."""

    @abstractmethod
    def fill(self, name: str, values: np.ndarray) -> tuple[np.ndarray, Tensor]:
        """Write to the beginning of a buffer: what was written, in its shape, on the host and on the device."""

    @abstractmethod
    def sent(self) -> None:
        """After the last ``fill`` of a step."""


Upload = Callable[["np.ndarray"], "Tensor"]
"""Brings an array to the device without the host waiting, into memory of its own; on a CPU the array's own memory."""


def upload_to(device: torch.device) -> Upload:
    """The plain way, for who is given none: the host may wait for it."""
    import torch  # noqa: PLC0415 - declarations import this module, and are light

    return lambda values: torch.from_numpy(values).to(device)  # pyright: ignore[reportUnknownMemberType]


class CacheMemory:
    """The memory of the KV cache, in ``pieces`` [num_bytes] uint8 of zeros, one for each layer."""

    def __init__(self, pieces: Sequence[Tensor]) -> None:
        self.pieces = pieces

    def scratch(self, first: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Around steps that mean nothing: where it costs nothing, what they store is forgotten afterwards.

        first: what the first request will write to, [num_bytes] uint8 each, so that its memory can be had ahead.
        """
        return nullcontext()


class Device(ABC):
    """One kind of device. Built in every process that makes a worker; only ``take`` touches one.

    - ``kind``: torch's name for it (``torch.device.type``).
    - ``collective``: torch.distributed's backend for its tensors.
    - ``is_host``: whether its tensors lie in the host's memory, and its work is done when a call returns.
    """

    kind: ClassVar[str]
    collective: ClassVar[str]
    is_host: ClassVar[bool] = False

    def __init__(self, context: DeviceContext) -> None:
        self.context = context

    @abstractmethod
    def missing(self) -> str | None:
        """Why a worker cannot have such a device here, as continues after "--device NAME:"; None when it can.

        Changes nothing, and neither takes a device nor its memory.
        """

    @abstractmethod
    def host(self) -> Host:
        """The machine as declarations see it, with the plugin's name as ``device``. Only where nothing is missing."""

    @abstractmethod
    def count(self) -> int | None:
        """How many there are, each for one worker; None when any number of workers share it."""

    @abstractmethod
    def take(self, index: int) -> torch.device:
        """Make a device the current one of the calling thread, which is to be the worker's, and return it.

        index: the worker's place among all of the run, which is its device's where each has one of its own.
        """

    @abstractmethod
    def memory(self, device: torch.device, num_sharers: int) -> MemoryInfo:
        """What one of ``num_sharers`` workers can have; that many share the memory only where ``count`` is None."""

    def trim(self, device: torch.device) -> None:
        """Give back what the allocator has taken and no tensor uses; ``Taken.most`` counts from here."""

    def taken(self, device: torch.device) -> Taken | None:
        """What the allocator has taken of the device's memory; None where that is not counted.

        By this the memory of the largest step is measured, which the KV cache must leave. A device that ``is_host`` is
        not asked.
        """
        return None

    @abstractmethod
    def defaults(self, stored_dtype: str, max_running_requests: int) -> DeviceDefaults:
        """What a run of a model that generates takes unless it is said. stored_dtype: the checkpoint's, by its name."""

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros of ``shape`` in the host's memory, with which the device copies while the host goes on, if it can."""
        import torch  # noqa: PLC0415 - declarations import this module, and are light

        return torch.zeros(tuple(shape), dtype=dtype)

    def event(self) -> Event:
        """A new mark in the order of the current device's work."""
        return NoEvent()

    def graph_capture(self) -> GraphCapture | None:
        """How steps of one size are captured on the current device; None where each is computed operator by operator.

        Of no interest to a device that ``is_host``: there it is the operators' affair (``Operators.graph_capture``).
        """
        return None

    def cache_memory(self, sizes: Sequence[int], device: torch.device) -> CacheMemory:
        """Memory for the KV cache: zeros, for a NaN in a masked place would survive the mask. sizes: bytes by layer."""
        import torch  # noqa: PLC0415

        return CacheMemory([torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes])


@dataclass(frozen=True, kw_only=True)
class DeviceSpec(Declaration):
    """Declares a device (``--device``); its name is what ``Needs.device`` and ``Limit("device", ...)`` mean.

    is_automatic: ``auto`` takes it where nothing is missing.
    """

    family: ClassVar[str] = "devices"

    is_automatic: bool = True
