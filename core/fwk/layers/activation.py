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
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function of this name. Raises ``ModelLoadError`` naming those known."""
    found = _KNOWN.get(name)
    if found is None:
        raise ModelLoadError(f"activation {name!r} is not known; this fwk computes {', '.join(_KNOWN)}")
    return found
