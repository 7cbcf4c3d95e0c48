"""The pretended device as a plugin of the family ``devices``, as a third party would bring one."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils import backend_registration

from fwk import DeviceSpec, hookimpl
from fwk.interfaces.declaration import Host
from fwk.interfaces.device import Device, DeviceDefaults, Event, MemoryInfo, Taken
from fwk.interfaces.graphs import GraphCapture
from fwk.plugins import PluginSet, discover
from tests.helpers.pretend_cuda import stand_in
from tests.helpers.pretend_cuda.graphs import Recording
from tests.helpers.pretend_cuda.tensors import DEVICE, JOURNAL, KIND, MEMORY, Pretending, pin

TOTAL = 2**30


class PretendedEvent(Event):
    """A place in the journal."""

    def __init__(self) -> None:
        self._mark = 0

    def record(self) -> None:
        self._mark = JOURNAL.mark()

    def wait(self) -> None:
        JOURNAL.wait(self._mark)


class Pretended(Device):
    """One device with memory of its own, for the tests of everything that is not a kernel."""

    kind = KIND
    total = TOTAL
    others = 0
    """Bytes that other processes have."""
    collective = "gloo"

    def missing(self) -> str | None:
        return None

    def host(self) -> Host:
        return Host("pretended", (9, 0))

    def count(self) -> int | None:
        return 1

    def take(self, index: int) -> torch.device:
        return DEVICE

    def memory(self, device: torch.device, num_sharers: int) -> MemoryInfo:
        return MemoryInfo(self.total - self.others - MEMORY.now, self.total)

    def trim(self, device: torch.device) -> None:
        MEMORY.trim()

    def taken(self, device: torch.device) -> Taken | None:
        return Taken(MEMORY.now, MEMORY.most)

    def defaults(self, stored_dtype: str, max_running_requests: int) -> DeviceDefaults:
        return DeviceDefaults(stored_dtype, 0.5, 2048)

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return pin(torch.zeros(tuple(shape), dtype=dtype))

    def event(self) -> Event:
        return PretendedEvent()

    def graph_capture(self) -> GraphCapture:
        return Recording()


@hookimpl
def devices() -> list[DeviceSpec]:
    return [DeviceSpec(name="pretended", load=f"{__name__}:Pretended", is_automatic=False, summary="not there")]


def _plugins() -> PluginSet:
    plugins = discover()
    plugins.register(sys.modules[__name__], "devices.pretended", "tests", "0")
    plugins.register(stand_in, "attention.flashinfer-stand-in", "tests", "0")
    return plugins


def _register() -> None:
    """Once in a process: torch learns that there is a device of this kind."""
    if not hasattr(torch, KIND):
        backend_registration._setup_privateuseone_for_python_backend()


@contextmanager
def pretended() -> Iterator[PluginSet]:
    """Within, tensors can be made on the device; yields all plugins and this one."""
    _register()
    JOURNAL.forget()
    gc.collect()  # what other tests left, which each start here would look at again several times
    gc.freeze()
    MEMORY.forget()  # what then still has memory is another process's on a real device
    torch._C._set_only_lift_cpu_tensors(True)  # type: ignore[attr-defined]
    try:
        with Pretending():
            yield _plugins()
    finally:
        torch._C._set_only_lift_cpu_tensors(False)  # type: ignore[attr-defined]
