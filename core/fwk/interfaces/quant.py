"""Weight formats of linear layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fwk.interfaces.declaration import Declaration

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer on this rank; ``out_features`` has one entry per fused part (q, k, v or gate, up)."""

    in_features: int
    out_features: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    prefix: str  # of the layer in the checkpoint, for per-layer choice


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One tensor a method reads from the checkpoint for each part of a layer.

    ``output_dim`` and ``input_dim`` say along which dimensions it follows the layer's sides, so that core can
    shard it for tensor parallelism and join fused parts; None means the dimension is not there. One entry stands for
    ``output_block`` or ``input_block`` features (a scale per group of 128, eight 4-bit numbers in an int32). Parts
    without an output dimension are stacked: ``[num_parts, ...]``.
    """

    output_dim: int | None
    input_dim: int | None
    dtype: torch.dtype
    is_optional: bool = False
    output_block: int = 1
    input_block: int = 1

    def shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """Of the tensor in the checkpoint, for one part of these sizes."""
        sizes = {
            self.output_dim: -(-out_features // self.output_block),
            self.input_dim: -(-in_features // self.input_block),
        }
        return tuple(size for _, size in sorted((d, s) for d, s in sizes.items() if d is not None))


Weights = Any
"""What ``finish`` returns; only the same method's ``apply`` looks inside."""


@dataclass(frozen=True, slots=True)
class QuantContext:
    """What a quantisation method is built with. ``checkpoint_config`` is config.json's ``quantization_config``."""

    device: torch.device
    dtype: torch.dtype
    checkpoint_config: Mapping[str, Any]
    options: Any = None


class QuantMethod(ABC):
    """Creates, repacks and applies the weights of linear layers; knows nothing of the model or other ranks."""

    def __init__(self, context: QuantContext) -> None:
        self.context = context

    @abstractmethod
    def params(self, shape: LinearShape) -> Mapping[str, ParamSpec]:
        """The tensors to read for each part, by their name after the layer's prefix (``weight``, ``scales``)."""

    @abstractmethod
    def finish(self, loaded: Mapping[str, Tensor], shape: LinearShape) -> Weights:
        """Repack once for the kernel. ``loaded`` holds the parts already sharded and joined along ``output_dim``."""

    @abstractmethod
    def apply(self, weights: Weights, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [num_tokens, in_features] to [num_tokens, sum(out_features)] in x's dtype."""


@dataclass(frozen=True, kw_only=True)
class QuantizerSpec(Declaration):
    """Declares a weight format.

    layouts: names of checkpoint layouts it reads (``quantization_config.quant_method``, or ``plain``); ``auto``
    takes the best-ranked quantiser that reads the checkpoint's layout without changing its numbers.
    is_lossless: whether the numbers stay those of the checkpoint.
    """

    family: ClassVar[str] = "quant"

    layouts: tuple[str, ...] = ("plain",)
    is_lossless: bool = False
