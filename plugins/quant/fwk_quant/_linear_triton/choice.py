"""Whether the kernels compute a run's packed layers; light to import."""

from __future__ import annotations

import os

import torch

from fwk.errors import ConfigError
from fwk.interfaces.quant import QuantContext
from fwk_quant._common.options import GemmBackend


def uses_triton(context: QuantContext, wanted: GemmBackend, flag: str) -> bool:
    """Whether the user asked for the kernels. Raises ``ConfigError`` where they do not run."""
    if wanted != "triton":
        return False
    why = _why_not(context)
    if why is not None:
        raise ConfigError(f"{flag} triton is not possible: {why}; leave the flag out")
    return True


def _why_not(context: QuantContext) -> str | None:
    device = context.device
    if context.is_deterministic:
        return "its sums depend on the number of tokens (--enable-deterministic-inference)"
    if device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
        is_new = torch.version.hip is not None or found >= (8, 0)
        return None if is_new else f"its kernels need compute capability 8.0, this device has {found}"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "its kernels need a cuda device, or TRITON_INTERPRET=1 to run in a slow interpreter"
    return None
