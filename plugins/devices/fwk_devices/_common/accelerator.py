"""A device with memory and an order of work of its own, through torch's module for it (torch.cuda, torch.xpu)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fwk.interfaces.device import Device, DeviceDefaults, Event, MemoryInfo, Taken
from fwk_devices._common.numa import keep_to_node

MEMORY_FRACTION = 0.88
STEP_TOKENS = 2048


class StreamEvent(Event):
    """torch's event, on the current stream."""

    def __init__(self, event: Any) -> None:
        self._event = event
        self._is_recorded = False

    def record(self) -> None:
        self._event.record()
        self._is_recorded = True

    def wait(self) -> None:
        if self._is_recorded:
            self._event.synchronize()


def accelerator_defaults(stored_dtype: str) -> DeviceDefaults:
    """In the checkpoint's own precision, or bfloat16 for one that says none that weights are computed in."""
    dtype = stored_dtype if stored_dtype in ("float32", "bfloat16", "float16") else "bfloat16"
    return DeviceDefaults(dtype, MEMORY_FRACTION, STEP_TOKENS)


class Accelerator(Device):
    """Devices of which each worker has one. ``kind`` names torch's module, too."""

    @property
    def _torch(self) -> Any:
        return getattr(torch, self.kind)

    def count(self) -> int | None:
        return self._torch.device_count()

    def take(self, index: int) -> torch.device:
        keep_to_node(self.context.options, index)
        self._torch.set_device(index)
        return torch.device(self.kind, index)

    def memory(self, device: torch.device, num_sharers: int) -> MemoryInfo:
        return MemoryInfo(*self._torch.mem_get_info(device))

    def trim(self, device: torch.device) -> None:
        self._torch.empty_cache()
        self._torch.reset_peak_memory_stats(device)

    def taken(self, device: torch.device) -> Taken:
        return Taken(self._torch.memory_reserved(device), self._torch.max_memory_reserved(device))

    def defaults(self, stored_dtype: str, max_running_requests: int) -> DeviceDefaults:
        return accelerator_defaults(stored_dtype)

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype).pin_memory()

    def event(self) -> Event:
        return StreamEvent(self._torch.Event())
