"""Random tensors that depend on nothing but their name and shape."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fwk.interfaces.loader import WeightSource

STD = 0.02
"""Of every weight: what models are initialised with, so that activations stay finite through many layers."""

HOST_NUMBERS = 2**20
"""Up to so many numbers a tensor is the same on every device; more would keep the host busy for minutes."""


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1


class DummyWeights(WeightSource):
    """Has every weight; biases and an output matrix of its own only where the configuration says so."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        # The norms of Gemma multiply by one plus their weight.
        self._norm = 0.0 if str(config.get("model_type", "")).startswith("gemma") else 1.0
        self._dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), torch.float32)
        if not isinstance(self._dtype, torch.dtype) or not self._dtype.is_floating_point:
            self._dtype = torch.float32

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Vectors named ``weight`` are norms and neutral, biases are zero, everything else is normal noise."""
        if len(shape) == 1:
            return torch.full(shape, 0.0 if name.endswith(".bias") else self._norm, dtype=self._dtype)
        generator = torch.Generator().manual_seed(_seed(name))
        return torch.empty(shape).normal_(0.0, STD, generator=generator).to(self._dtype)

    def tensor_on(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Large ones are made there, by a generator of the device: equal from run to run, other than the host's."""
        if len(shape) == 1 or math.prod(shape) <= HOST_NUMBERS:
            return self.tensor(name, shape).to(device)
        generator = torch.Generator(device).manual_seed(_seed(name))
        return torch.empty(shape, dtype=self._dtype, device=device).normal_(0.0, STD, generator=generator)

    def has(self, name: str) -> bool:
        """Whether a real checkpoint of this configuration would hold the tensor."""
        if name == "lm_head.weight":
            return not self._config.get("tie_word_embeddings", False)
        if not name.endswith(".bias"):
            return name.endswith(".weight")
        if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj") and self._config.get("model_type") == "qwen2":
            return True
        return bool(self._config.get("attention_bias" if ".self_attn." in name else "mlp_bias", False))

    def names(self) -> Iterable[str]:
        """None: whatever is asked for exists, so nothing can be left over."""
        return ()
