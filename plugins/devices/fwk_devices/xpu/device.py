"""Intel GPUs through torch.xpu."""

from __future__ import annotations

import torch

from fwk.interfaces.declaration import Host
from fwk_devices._common.accelerator import Accelerator
from fwk_native import cpu_flags


class Xpu(Accelerator):
    kind = "xpu"
    collective = "xccl"

    def missing(self) -> str | None:
        if not torch.xpu.is_available():
            return "torch sees no Intel GPU (torch.xpu.is_available() is false): install torch from its XPU index"
        return None

    def host(self) -> Host:
        return Host("xpu", None, cpu_flags())
