"""All of a step's inputs in one copy: to a device each copy costs a launch, however few numbers it brings."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fwk.interfaces.device import Device
from fwk.worker.runner.staging import StagingRing, Views

ALIGNMENT = 16


class PackedRing(StagingRing):
    """A ring whose parts are adjacent, in the order in which they are filled, and go to the device together.

    What ``fill`` returns is on the device once ``sent`` has been called, and is where it was in a step that filled the
    same names in the same order with as many numbers: there a captured step finds it. For devices other than the host.
    """

    def __init__(self, device: Device, where: torch.device, size: int) -> None:
        super().__init__(device, where, size)
        self._room: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._own: dict[str, Tensor] = {}  # of ``put``, by name
        self._memory = torch.empty(0, dtype=torch.uint8)  # the device's
        self._pieces: list[Tensor] = []  # of pinned memory, one a set
        self._bytes: list[np.ndarray] = []
        self._parts: dict[str, tuple[int, int, Tensor]] = {}  # first byte, numbers and view of the part filled last
        self._twins: list[dict[str, tuple[int, int, np.ndarray]]] = []
        self._spans: list[tuple[int, int, Tensor, Tensor] | None] = []  # that were copied last
        self._used = self._sent = 0

    def add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._room[name] = shape, dtype
        self._own.pop(name, None)
        self._memory = torch.empty(0, dtype=torch.uint8)  # made when the first part is filled

    def grow(self, count: int) -> None:
        self._events += [self._device.event() for _ in range(count)]
        self._size += count
        self._memory = torch.empty(0, dtype=torch.uint8)

    def turn(self) -> None:
        if not len(self._memory):
            self._allocate()
        super().turn()
        self._used = self._sent = 0

    def fill(self, name: str, values: np.ndarray) -> Views:
        """Write to a buffer's place in this step: [n], of the device not before ``sent``."""
        count, start = len(values), -(-self._used // ALIGNMENT) * ALIGNMENT
        part, twin = self._parts.get(name), self._twins[self._at].get(name)
        if part is None or part[0] != start or part[1] != count:  # making views costs more than filling them
            dtype = self._room[name][1]
            span = slice(start, start + count * dtype.itemsize)
            part = self._parts[name] = start, count, self._memory[span].view(dtype)
        if twin is None or twin[0] != start or twin[1] != count:
            of_kind = torch.empty(0, dtype=self._room[name][1]).numpy().dtype
            span = slice(start, start + count * of_kind.itemsize)
            twin = self._twins[self._at][name] = start, count, self._bytes[self._at][span].view(of_kind)
        np.copyto(twin[2], values, casting="same_kind")
        self._used = start + twin[2].nbytes
        return twin[2], part[2]

    def sent(self) -> None:
        """Copy what was filled since the last time, and mark where the copy ends."""
        if self._used > self._sent:
            known = self._spans[self._at]
            if known is None or known[:2] != (self._sent, self._used):
                span = slice(self._sent, self._used)
                known = self._sent, self._used, self._memory[span], self._pieces[self._at][span]
                self._spans[self._at] = known
            known[2].copy_(known[3], non_blocking=True)
            self._sent = self._used = -(-self._used // ALIGNMENT) * ALIGNMENT
        super().sent()

    def put(self, name: str, values: Tensor) -> Tensor:
        if name not in self._own:
            shape, dtype = self._room[name]
            self._own[name] = torch.zeros(shape, dtype=dtype, device=self.where)
        return self._own[name][: len(values)].copy_(values)

    def _allocate(self) -> None:
        """Room for all parts, each as large as it may be."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in self._room.values()]
        total = sum(size + ALIGNMENT for size in sizes)
        self._memory = torch.zeros(total, dtype=torch.uint8, device=self.where)
        self._pieces = [self._device.host_buffer((total,), torch.uint8) for _ in range(self._size)]
        self._bytes = [piece.numpy() for piece in self._pieces]
        self._parts.clear()
        self._twins = [{} for _ in range(self._size)]
        self._spans = [None] * self._size
