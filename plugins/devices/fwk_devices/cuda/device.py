"""NVIDIA GPUs through torch.cuda."""

from __future__ import annotations

import torch

from fwk.interfaces.declaration import Host
from fwk.interfaces.graphs import GraphCapture
from fwk_devices._common.accelerator import Accelerator
from fwk_devices.cuda.graph import CudaCapture
from fwk_native import cpu_flags


class Cuda(Accelerator):
    kind = "cuda"
    collective = "nccl"

    def missing(self) -> str | None:
        if torch.version.hip is not None:
            return "this torch is built for AMD devices: --device rocm"
        if not torch.cuda.is_available():
            return "this machine has no usable GPU (torch.cuda.is_available() is false)"
        return None

    def host(self) -> Host:
        return Host("cuda", torch.cuda.get_device_capability(), cpu_flags())

    def graph_capture(self) -> GraphCapture:
        return CudaCapture()
