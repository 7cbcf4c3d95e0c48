"""Small arrays on their way to a device: what a step needs besides the inputs of its forward pass."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fwk.interfaces.device import Device

ALIGNMENT = 16
FIRST_BYTES = 1 << 16


class Uploads:
    """Copies arrays to the device through pinned memory, ``size`` pieces of it in turn.

    As with ``StagingRing``, a piece is written to again only when the event after its last copies has come, which with
    more pieces than steps in flight was long before. On a device that is the host, an array is handed over as it is.
    """

    def __init__(self, device: Device, where: torch.device, size: int) -> None:
        self._device = device
        self._where = where
        self._events = [device.event() for _ in range(size)]
        self._pieces = [self._piece(FIRST_BYTES) for _ in range(0 if device.is_host else size)]
        self._at = 0
        self._used = 0

    def turn(self) -> None:
        """A step begins: turn to the next piece, which may be written to when this returns."""
        if not self._device.is_host:
            self._events[self._at].record()
            self._at = (self._at + 1) % len(self._pieces)
            self._events[self._at].wait()
            self._used = 0

    def send(self, values: np.ndarray) -> Tensor:
        """The same numbers on the device, in a tensor of their own; the host does not wait."""
        if self._device.is_host:
            return torch.from_numpy(values)
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        end = start + values.nbytes
        if end > self._pieces[self._at].numel():  # the smaller piece lives until its copies have been made
            start, end = 0, values.nbytes
            self._pieces[self._at] = self._piece(max(2 * self._pieces[self._at].numel(), 2 * values.nbytes))
        host = self._pieces[self._at][start:end].view(torch.from_numpy(values[:0]).dtype).view(values.shape)
        self._used = end
        np.copyto(host.numpy(), values)
        sent = torch.empty(values.shape, dtype=host.dtype, device=self._where)
        sent.copy_(host, non_blocking=True)
        return sent

    def _piece(self, num_bytes: int) -> Tensor:
        return self._device.host_buffer((num_bytes,), torch.uint8)
