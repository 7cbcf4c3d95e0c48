"""LoRA: kernels for batches of mixed adapters, and places adapters come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fwk.interfaces.declaration import Declaration

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fwk.interfaces.quant import LinearShape


@dataclass(frozen=True, slots=True)
class LoRAContext:
    """What a LoRA backend is built with."""

    device: torch.device
    dtype: torch.dtype
    max_adapters: int
    max_rank: int
    options: Any = None


class LoRABackend(ABC):
    """Holds the loaded adapters' matrices and adds their products to linear layers."""

    def __init__(self, context: LoRAContext) -> None:
        self.context = context

    @abstractmethod
    def register(self, prefix: str, shape: LinearShape) -> int:
        """Called once for each linear layer that can be adapted; returns the layer's number."""

    @abstractmethod
    def load(self, adapter: int, layer: int, a: Tensor, b: Tensor, scale: float) -> None:
        """Put an adapter's A [rank, in] and B [out, rank] for one layer in place, scaled."""

    @abstractmethod
    def unload(self, adapter: int) -> None:
        """Forget an adapter."""

    @abstractmethod
    def apply(self, y: Tensor, x: Tensor, layer: int, adapter_ids: Tensor) -> Tensor:
        """y + B(A(x)) per token, ``adapter_ids`` [num_tokens] int32 with -1 for none."""


@dataclass(frozen=True, kw_only=True)
class LoRABackendSpec(Declaration):
    """Declares LoRA kernels (``--lora-backend``)."""

    family: ClassVar[str] = "lora"


class LoRASource(ABC):
    """Finds an adapter by name."""

    @abstractmethod
    async def fetch(self, name: str) -> Path | None:
        """Local folder in PEFT layout, or None when unknown here. Never leaves the folders it was told to use."""


@dataclass(frozen=True, kw_only=True)
class LoRASourceSpec(Declaration):
    """Declares a LoRA source; all are asked in order of rank."""

    family: ClassVar[str] = "lora_sources"
