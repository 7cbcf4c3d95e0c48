"""Attention in both directions, for models that read whole sequences and keep nothing of them."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from fwk.types import ForwardBatch


class EncoderAttention:
    """Every token of a sequence sees every other one of it. Needs no KV cache, so no attention backend either.

    Sequences stand packed one after another and are computed each by itself: none is padded, so none depends on the
    lengths of the others.
    """

    def __init__(self, head_size: int, scale: float | None = None) -> None:
        self.scale = head_size**-0.5 if scale is None else scale

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, bias: Mapping[int, Tensor] | None = None
    ) -> Tensor:
        """q, k, v: [num_tokens, num_heads, head_size]. Returns [num_tokens, num_heads * head_size].

        bias: for each length of a sequence what is added to the scores, [num_heads, length, length].
        """
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for start, end in pairwise(batch.query_start_np.tolist()):
            rows = slice(start, end)
            heads = [x[rows].transpose(0, 1).unsqueeze(0) for x in (q, k, v)]  # [1, num_heads, length, head_size]
            added = None if bias is None else bias[end - start].unsqueeze(0)
            attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], attn_mask=added, scale=self.scale)
            out[rows] = attended[0].transpose(0, 1)
        return out.view(out.shape[0], -1)
