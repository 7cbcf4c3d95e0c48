"""AMD GPUs, which torch's builds for ROCm call cuda, too."""

from __future__ import annotations

import torch

from fwk.interfaces.declaration import Host
from fwk_devices._common.accelerator import Accelerator
from fwk_native import cpu_flags


class Rocm(Accelerator):
    kind = "cuda"
    collective = "nccl"  # RCCL goes by this name in torch.distributed

    def missing(self) -> str | None:
        if torch.version.hip is None:
            return "this torch is not built for ROCm: install torch from its ROCm index"
        if not torch.cuda.is_available():
            return "this machine has no usable AMD GPU (torch.cuda.is_available() is false)"
        return None

    def host(self) -> Host:
        return Host("rocm", None, cpu_flags())
