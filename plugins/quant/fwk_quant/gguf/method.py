"""Products with matrices that stay in the blocks of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fwk.errors import ModelLoadError
from fwk.interfaces.quant import LinearShape, ParamSpec, QuantMethod
from fwk_quant._common.product import multiply
from fwk_quant.gguf.blocks import BLOCK_TYPES, BlockType, factor

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """blocks: [rows, blocks of a row, bytes of a block] uint8."""

    type: BlockType
    blocks: Tensor


class GGUFMethod(QuantMethod):
    """Rows are unpacked a chunk at a time, for each product anew."""

    can_embed = True

    def params(self, shape: LinearShape) -> Mapping[str, ParamSpec]:
        kind = BLOCK_TYPES[shape.layout]
        return {"weight": ParamSpec(0, 1, torch.uint8, input_block=kind.num_values, trailing=(kind.num_bytes,))}

    def finish(self, loaded: Mapping[str, Tensor], shape: LinearShape) -> BlockMatrix:
        """Keeps the blocks as they are. Raises ``ModelLoadError`` when a factor is not a finite number."""
        matrix = BlockMatrix(BLOCK_TYPES[shape.layout], loaded["weight"])
        for start in matrix.type.factors:
            if not bool(torch.isfinite(factor(matrix.blocks, start)).all()):
                raise ModelLoadError(
                    f"{shape.prefix}: the scale of a block is infinite or not a number: fetch it again"
                )
        return matrix

    def apply(self, weights: BlockMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        rows, num_blocks, _ = weights.blocks.shape
        kind = weights.type
        return multiply(
            x,
            (rows, num_blocks * kind.num_values),
            lambda start, stop: _dense(kind, weights.blocks[start:stop], x.dtype),
            bias,
        )

    def rows(self, weights: BlockMatrix, indices: Tensor) -> Tensor:
        return _dense(weights.type, weights.blocks[indices], self.context.dtype)


def _dense(kind: BlockType, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, columns]; computed in float32 and rounded once."""
    return kind.unpack(blocks).flatten(1).to(dtype)
