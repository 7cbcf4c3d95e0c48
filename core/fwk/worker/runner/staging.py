"""Host memory that a device copies a step's inputs from, while the host may be at the next step's already."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fwk.interfaces.device import Device, Staging

Views = tuple[np.ndarray, Tensor]
"""The used part of a buffer: on the host, and on the device."""


class StagingRing(Staging):
    """Buffers on the device, and ``size`` sets of twins on the host, used in turn.

    A set is written to again only when the event after its last copies has come: a step that does not sample is not
    waited for, so without it the host would overwrite what a copy still reads. With more sets than steps in flight it
    has come long before. Where the device's memory is the host's there is one set, which is the buffers themselves.
    """

    def __init__(self, device: Device, where: torch.device, size: int) -> None:
        self._device = device
        self.where = where
        self._size = 1 if device.is_host else size
        self._tensors: dict[str, Tensor] = {}
        self._arrays: list[dict[str, np.ndarray]] = [{} for _ in range(self._size)]
        self._hosts: list[dict[str, Tensor]] = [{} for _ in range(self._size)]
        self._views: list[dict[str, Views]] = [{} for _ in range(self._size)]  # of the parts that were used last
        self._events = [device.event() for _ in range(self._size)]
        self._at = 0

    @property
    def is_host(self) -> bool:
        """Whether what is written is on the device at once."""
        return self._device.is_host

    def add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """A buffer of zeros; one of that name before it is given up."""
        for views in self._views:
            views.pop(name, None)
        self._tensors[name] = torch.zeros(shape, dtype=dtype, device=self.where)
        for hosts, arrays in zip(self._hosts, self._arrays, strict=True):
            hosts[name] = self._tensors[name] if self.is_host else self._device.host_buffer(shape, dtype)
            arrays[name] = hosts[name].numpy()

    def grow(self, count: int) -> None:
        """So many more sets, for who turns to several in a step. On a device that is the host, one is enough."""
        for _ in range(0 if self.is_host else count):
            hosts = {name: self._device.host_buffer(x.shape, x.dtype) for name, x in self._tensors.items()}
            self._hosts.append(hosts)
            self._arrays.append({name: host.numpy() for name, host in hosts.items()})
            self._views.append({})
            self._events.append(self._device.event())
            self._size += 1

    def turn(self) -> None:
        """Turn to the next set, which may be written to when this returns."""
        if not self.is_host:
            self._at = (self._at + 1) % self._size
            self._events[self._at].wait()

    def sent(self) -> None:
        """The set is complete: mark where its copies end."""
        self._events[self._at].record()

    def fill(self, name: str, values: np.ndarray) -> Views:
        """Write to the beginning of a buffer."""
        views = self._views[self._at].get(name)
        if views is None or len(views[0]) != len(values):  # making views costs as much as filling them
            views = self._arrays[self._at][name][: len(values)], self._tensors[name][: len(values)]
            self._views[self._at][name] = views
        np.copyto(views[0], values, casting="same_kind")
        if not self.is_host:
            views[1].copy_(self._hosts[self._at][name][: len(values)], non_blocking=True)
        return views

    def put(self, name: str, values: Tensor) -> Tensor:
        """Write numbers that are on the device already to the beginning of a buffer."""
        views = self._views[self._at].pop(name, None)
        target = self._tensors[name][: len(values)] if views is None or len(views[0]) != len(values) else views[1]
        return target.copy_(values)

    def last(self, name: str) -> np.ndarray:
        """What ``fill`` wrote last, to be changed in place: for buffers that are the device's own (``is_host``)."""
        return self._views[0][name][0]
