"""The one GPU of an Apple machine, through torch.mps. It shares the host's memory."""

from __future__ import annotations

import psutil
import torch

from fwk.interfaces.declaration import Host
from fwk.interfaces.device import Device, DeviceDefaults, Event, MemoryInfo
from fwk_devices._common.accelerator import StreamEvent, accelerator_defaults
from fwk_native import cpu_flags


class Mps(Device):
    kind = "mps"
    collective = "gloo"

    def missing(self) -> str | None:
        if not torch.backends.mps.is_available():
            return "torch sees no Apple GPU (torch.backends.mps.is_available() is false)"
        return None

    def host(self) -> Host:
        return Host("mps", None, cpu_flags(), lacks=frozenset({"float64"}))

    def count(self) -> int | None:
        return 1

    def take(self, index: int) -> torch.device:
        return torch.device("mps")

    def memory(self, device: torch.device, num_sharers: int) -> MemoryInfo:
        total = torch.mps.recommended_max_memory()
        used = torch.mps.driver_allocated_memory()
        return MemoryInfo(min(total - used, psutil.virtual_memory().available), total)

    def defaults(self, stored_dtype: str, max_running_requests: int) -> DeviceDefaults:
        return accelerator_defaults(stored_dtype)

    def event(self) -> Event:
        return StreamEvent(torch.mps.Event())
