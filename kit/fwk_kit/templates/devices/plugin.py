"""The CPU with a twentieth of its memory. A device with memory of its own says more: ``host_buffer`` and ``event``."""

from __future__ import annotations

import psutil
import torch

from fwk.interfaces.declaration import Host
from fwk.interfaces.device import Device, DeviceDefaults, MemoryInfo


class MineDevice(Device):
    """Every worker shares it. Plugins that ask for a device by another name do not serve it."""

    kind = "cpu"
    collective = "gloo"
    is_host = True

    def missing(self) -> str | None:
        return None

    def host(self) -> Host:
        return Host("mine")

    def count(self) -> int | None:
        return None

    def take(self, index: int) -> torch.device:
        return torch.device("cpu")

    def memory(self, device: torch.device, num_sharers: int) -> MemoryInfo:
        free = psutil.virtual_memory().available // num_sharers
        return MemoryInfo(free, free)

    def defaults(self, stored_dtype: str, max_running_requests: int) -> DeviceDefaults:
        """Everything in float32, in steps of at most 512 tokens."""
        why = None if stored_dtype == "float32" else f"dtype float32 instead of the checkpoint's {stored_dtype}"
        return DeviceDefaults("float32", 0.05, max(512, max_running_requests), why=why)
