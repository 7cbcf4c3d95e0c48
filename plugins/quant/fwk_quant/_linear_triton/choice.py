"""Whether the kernels compute a run's packed layers; light to import."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from fwk.errors import ConfigError
from fwk.interfaces.declaration import Host, Needs
from fwk.interfaces.quant import QuantContext
from fwk_quant._common.options import GemmBackend

ANYWHERE = Needs(packages=("triton>=3.4",))
ON_DEVICE = replace(ANYWHERE, device="cuda", compute_capability=(8, 0))


def uses_triton(context: QuantContext, wanted: GemmBackend, flag: str) -> bool:
    """Whether the user asked for the kernels. Raises ``ConfigError`` where they do not run."""
    if wanted != "triton":
        return False
    why = _why_not(context)
    if why is not None:
        raise ConfigError(f"{flag} triton is not possible: {why}; leave the flag out")
    return True


def _why_not(context: QuantContext) -> str | None:
    if context.is_deterministic:
        return "its sums depend on the number of tokens (--enable-deterministic-inference)"
    device = context.device
    is_cuda = device.type == "cuda"
    if not is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return "its kernels need a cuda device, or TRITON_INTERPRET=1 to run in a slow interpreter"
    capability = torch.cuda.get_device_capability(device) if is_cuda else None
    why = (ON_DEVICE if is_cuda else ANYWHERE).refusal(Host(device.type, capability))
    return None if why is None else f"triton {why}"
