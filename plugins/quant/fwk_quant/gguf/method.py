"""Products with matrices that stay in the blocks of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fwk.errors import ModelLoadError
from fwk.interfaces.native import NativeLinear
from fwk.interfaces.quant import LinearShape, ParamSpec, QuantContext, QuantMethod
from fwk.interfaces.weights_cache import PackedTensors
from fwk_quant._common.activations import integer_kernel
from fwk_quant._common.product import multiply
from fwk_quant._linear_cpu.integers import Integers
from fwk_quant._linear_cpu.kernel import PackedMatrix
from fwk_quant._linear_cpu.packed import from_packed, layout_version, to_packed
from fwk_quant.gguf.blocks import BLOCK_TYPES, BlockType, Fields

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
        if kind.is_damaged(blocks):
            raise ModelLoadError(f"{shape.prefix}: the scale of a block is infinite or not a number: fetch it again")
        if self._kernel is not None:

            def rows(start: int, stop: int) -> Integers:
                return kind.integers(blocks[start:stop])

            return self._kernel.pack_slices(blocks.shape[0], shape.in_features, rows)
        return BlockMatrix(kind, (blocks.shape[0], shape.in_features), kind.split(blocks))

    def apply(self, weights: BlockMatrix | PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(weights, PackedMatrix):
            assert self._kernel is not None
            return self._kernel.apply(weights, x, bias)
        return multiply(x, weights.size, lambda start, stop: weights.dense(slice(start, stop), x.dtype), bias)

    @property
    def packed_version(self) -> str | None:
        return None if self._kernel is None else layout_version()

    def to_packed(self, weights: BlockMatrix | PackedMatrix) -> PackedTensors | None:
        return to_packed([weights]) if isinstance(weights, PackedMatrix) else None

    def from_packed(self, packed: PackedTensors) -> PackedMatrix:
        return from_packed(packed)[0]

    def native(self, weights: BlockMatrix | PackedMatrix, num_slices: int) -> list[NativeLinear] | None:
        if self._kernel is None or not isinstance(weights, PackedMatrix):
            return None
        return self._kernel.slices(weights, num_slices)

    def rows(self, weights: BlockMatrix | PackedMatrix, indices: Tensor) -> Tensor:
        if isinstance(weights, PackedMatrix):
            assert self._kernel is not None
            return self._kernel.rows(weights, indices, self.context.dtype)
        return weights.dense(indices, self.context.dtype)
