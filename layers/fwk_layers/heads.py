"""Products that go head by head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fwk_layers.sharding import Part, output_shard, plain_weight

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext


class HeadMatrices:
    """A linear layer's weight as small matrices, ``sizes`` rows each, for every head of this rank.

    The checkpoint's ``weight`` is [num_heads * sum(sizes), in_features], a head's matrices one after another. They are
    multiplied from either side, which packed weights cannot be: packed ones are unpacked, plain ones stay plain.
    """

    def __init__(
        self, context: ModelContext, prefix: str, num_heads: int, sizes: Sequence[int], in_features: int
    ) -> None:
        rows, name = num_heads * sum(sizes), f"{prefix}.weight"
        whole = plain_weight(context, prefix, rows, in_features)
        mine = output_shard(Part(prefix, rows, num_heads), context.tp).cut(whole, 0, 1, name)
        heads = mine.to(context.device, context.dtype).view(-1, sum(sizes), in_features)
        self.matrices = [matrix.contiguous() for matrix in heads.split(list(sizes), 1)]
        """One tensor for each of ``sizes``: [num_heads, size, in_features]."""

    def up(self, index: int, x: Tensor) -> Tensor:
        """As the linear layer does: [num_tokens, num_heads, in_features] to [num_tokens, num_heads, size]."""
        return (x.transpose(0, 1) @ self.matrices[index].transpose(1, 2)).transpose(0, 1)

    def down(self, index: int, x: Tensor) -> Tensor:
        """By the transposed matrices: [num_tokens, num_heads, size] to [num_tokens, num_heads, in_features]."""
        return (x.transpose(0, 1) @ self.matrices[index]).transpose(0, 1)
