"""Activation functions, by their names in config.json."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch.nn.functional as F

from fwk.errors import ModelLoadError

if TYPE_CHECKING:
    from torch import Tensor

_KNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_fast": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * (1.702 * x).sigmoid(),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


CLAMPED_SWIGLU = "clamped_swiglu"


def gated(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """What becomes of gate and up: the gate's activation times up, or a function of both; may change either.

    ``clamped_swiglu``: min(gate, 7) * sigmoid(1.702 * min(gate, 7)) * (clamp(up, -7, 7) + 1) (gpt-oss).
    """
    if name == CLAMPED_SWIGLU:
        return _clamped_swiglu
    function = activation(name)
    return lambda gate, up: function(gate).mul_(up)


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=7.0)
    return gate * (gate * 1.702).sigmoid_() * (up.clamp(-7.0, 7.0) + 1)


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function of this name. Raises ``ModelLoadError`` naming those known."""
    found = _KNOWN.get(name)
    if found is None:
        raise ModelLoadError(f"activation {name!r} is not known; this fwk computes {', '.join(_KNOWN)}")
    return found
