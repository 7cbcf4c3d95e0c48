"""Products with matrices that stay in the blocks of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fwk.errors import ModelLoadError
from fwk.interfaces.quant import LinearShape, ParamSpec, QuantContext, QuantMethod
from fwk_quant._common.activations import integer_kernel
from fwk_quant._common.product import multiply
from fwk_quant._linear_cpu.kernel import PackedMatrix
from fwk_quant.gguf.blocks import BLOCK_TYPES, BlockType, Fields, factor

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """``size`` is (rows, columns); ``fields`` are those of the type, for all rows."""

    type: BlockType
    size: tuple[int, int]
    fields: Fields

    def dense(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """Some rows as numbers; computed in float32 and rounded once."""
        return self.type.unpack(tuple(field[rows] for field in self.fields)).to(dtype)


class GGUFMethod(QuantMethod):
    """By the native kernel, or else rows are unpacked a chunk at a time, for each product anew."""

    can_embed = True

    def __init__(self, context: QuantContext) -> None:
        super().__init__(context)
        self._kernel = integer_kernel(context, context.options.gguf_activations, "--gguf-activations")

    def params(self, shape: LinearShape) -> Mapping[str, ParamSpec]:
        kind = BLOCK_TYPES[shape.layout]
        return {"weight": ParamSpec(0, 1, torch.uint8, input_block=kind.num_values, trailing=(kind.num_bytes,))}

    def finish(self, loaded: Mapping[str, Tensor], shape: LinearShape) -> BlockMatrix | PackedMatrix:
        """Raises ``ModelLoadError`` when a factor is not a finite number."""
        kind, blocks = BLOCK_TYPES[shape.layout], loaded["weight"]
        for start in kind.factors:
            if not bool(torch.isfinite(factor(blocks, start)).all()):
                raise ModelLoadError(
                    f"{shape.prefix}: the scale of a block is infinite or not a number: fetch it again"
                )
        fields = kind.split(blocks)
        if self._kernel is not None:
            return self._kernel.pack(kind.integers(fields))
        return BlockMatrix(kind, (blocks.shape[0], shape.in_features), fields)

    def apply(self, weights: BlockMatrix | PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(weights, PackedMatrix):
            assert self._kernel is not None
            return self._kernel.apply(weights, x, bias)
        return multiply(x, weights.size, lambda start, stop: weights.dense(slice(start, stop), x.dtype), bias)

    def rows(self, weights: BlockMatrix | PackedMatrix, indices: Tensor) -> Tensor:
        if isinstance(weights, PackedMatrix):
            assert self._kernel is not None
            return self._kernel.rows(weights, indices, self.context.dtype)
        return weights.dense(indices, self.context.dtype)
