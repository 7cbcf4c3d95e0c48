"""What a plan copies to the device, without the host waiting for the steps that still read the plan before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.attention import AttentionContext

MIN_ROOM = 1024
"""Rows of a buffer. One that is too small is doubled: each has pinned memory, for which the device is waited for."""


class PlanBuffers:
    """Named buffers on the device. Those of ``fixed`` stay where they are; others grow."""

    def __init__(self, context: AttentionContext) -> None:
        self._device = context.device
        self._staging = context.staging() if context.staging is not None else None
        self._tensors: dict[str, Tensor] = {}  # where there is no staging
        self._rooms: dict[str, int] = {}

    def turn(self) -> None:
        """Before the first of a plan."""
        if self._staging is not None:
            self._staging.turn()

    def sent(self) -> None:
        """After the last of a plan."""
        if self._staging is not None:
            self._staging.sent()

    def fixed(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """A buffer for ``write``, of zeros."""
        self._rooms[name] = shape[0]
        if self._staging is not None:
            self._staging.add(name, shape, dtype)
        else:
            self._tensors[name] = torch.zeros(shape, dtype=dtype, device=self._device)

    def expect(self, name: str, row: tuple[int, ...], dtype: torch.dtype, least: int = MIN_ROOM) -> None:
        """Make room for at least so many rows of what ``send`` will be given, before a step waits for it."""
        if self._staging is not None and self._rooms.get(name, 0) < least:
            self.fixed(name, (max(least, MIN_ROOM, 2 * self._rooms.get(name, 0)), *row), dtype)

    def write(self, name: str, values: Any) -> Tensor:
        """Fill the beginning of a fixed buffer with a numpy array; returns it on the device."""
        if self._staging is not None:
            return self._staging.fill(name, values)[1]
        view = self._tensors[name][: len(values)]
        view.copy_(torch.from_numpy(values))
        return view

    def send(self, name: str, values: Any) -> Tensor:
        """A numpy array on the device, until the next of that name."""
        if self._staging is None:
            return torch.from_numpy(values.copy()).to(self._device)
        if self._rooms.get(name, 0) < len(values):
            self.expect(name, values.shape[1:], torch.from_numpy(values[:0]).dtype, len(values))
        return self.write(name, values)
