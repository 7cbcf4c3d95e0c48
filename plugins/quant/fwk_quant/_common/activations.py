"""Whether activations are rounded to 8 bits, as the native kernels of integers want them."""

from __future__ import annotations

import logging

import torch

import fwk_native as native
from fwk.errors import ConfigError
from fwk.interfaces.quant import QuantContext
from fwk_quant._common.options import Activations
from fwk_quant._linear_cpu.integers import IntegerKernel

logger = logging.getLogger(__name__)


def integer_kernel(context: QuantContext, wanted: Activations, flag: str) -> IntegerKernel | None:
    """The kernel that rounds activations, or None where they are kept.

    Raises ``ConfigError`` when the user asked for rounding, and it cannot be had.
    """
    why = _why_not(context)
    if context.is_deterministic and wanted == "full":
        raise ConfigError(
            f"{flag} full is computed by torch, whose order of additions depends on the number of tokens: leave it or "
            "--enable-deterministic-inference out"
        )
    if wanted == "full" or (wanted == "auto" and context.dtype != torch.bfloat16):
        return None
    if why is None:
        return IntegerKernel(context.threads)
    if wanted == "8bit":
        raise ConfigError(f"{flag} 8bit is not possible: the native kernel {why}; leave the flag out")
    if context.device.type == "cpu":
        logger.warning("packed weights are unpacked by torch for each product, slowly: the native kernel %s", why)
    return None


def _why_not(context: QuantContext) -> str | None:
    """Why there is no kernel, as a predicate."""
    if context.device.type != "cpu":
        return "is for CPUs"
    if context.dtype not in (torch.float32, torch.bfloat16):
        return f"does not compute in {str(context.dtype).removeprefix('torch.')}"
    return native.refusal()
