"""Options that several quantisers have, light to import."""

from __future__ import annotations

from typing import Any, Literal

from fwk.config import option

Activations = Literal["auto", "8bit", "full"]


def activations_option() -> Any:
    """How activations are treated; each quantiser has it under a name of its own."""
    return option(
        "auto",
        "Activations of these layers on a CPU: 8bit rounds them, with a scale for every 16 to 64 inputs of a token, "
        "for a fast integer kernel (with AMX, where a row of weights has one scale, to 16 bits with one scale a token, "
        "which is faster there and loses less); full keeps them, and weights are unpacked for each product; auto: "
        "8bit in bfloat16, else full.",
    )


GemmBackend = Literal["auto", "torch", "triton"]


def gemm_backend_option() -> Any:
    """What multiplies on a device; each quantiser has it under a name of its own."""
    return option(
        "auto",
        "Products of these layers on a device: torch unpacks a matrix for each; triton multiplies up to 64 tokens by "
        "numbers as they are packed, in kernels of fwk's that no GPU has run yet; auto: torch, until one has.",
        stability="beta",
    )
