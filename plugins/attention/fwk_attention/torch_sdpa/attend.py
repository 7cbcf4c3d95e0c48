"""Attention over dense tensors.

Query heads that share a KV head are treated as further queries of it, so K and V are never repeated.

q: [n, num_queries, kv_heads, group, head_size]; k: [n, kv_heads, num_keys, head_size]; v: the same, perhaps with
another size, which is then that of the outcome.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.attention import AttentionLayer

MAX_FUSED = 512
"""Queries times keys up to which torch's fused kernel beats separate products on a CPU (measured: 31 against 66 us)."""

MANY_KEYS = 512
STRIDE = 8
"""Of that many keys every eighth is looked at for the size of scores; reading less of fewer would save nothing."""


def prefers_fused(device: torch.device, num_scores: int) -> bool:
    """Whether ``fused`` is quicker than ``products`` for so many queries times keys."""
    return device.type != "cpu" or num_scores <= MAX_FUSED


def fused_mask(mask: Tensor, group: int) -> Tensor:
    """[n, num_queries, num_keys] as ``fused`` wants it: [n, 1, num_queries * group, num_keys]."""
    return mask.repeat_interleave(group, dim=1).unsqueeze(1)


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax(q k^T * scale + mask) v in one kernel, arranged as q; ``mask`` comes from ``fused_mask``."""
    folded = _fold(q)
    out = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale)
    return _unfold(out, q)


def products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The same as batched products; mask: [n, num_queries, num_keys], 0 or -inf.

    A half-precision product rounds scores to 8 bits, which would spoil large ones. As softmax does not mind a
    constant on a whole row, the product's float32 accumulator starts at minus a score near the row's largest (found
    in a product before, of all keys or some): the scores that matter come out near zero, where rounding does no harm.
    """
    n, _, heads, group, _ = q.shape
    queries, keys, values = _fold(q).flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    rows = queries.shape[1]

    def spread(x: Tensor) -> Tensor:
        """[n, 1 or heads, num_queries, 1 or group, x] for each of the queries' rows."""
        return x.expand(n, heads, -1, group, -1).reshape(n * heads, rows, -1)

    start = mask[:, None, :, None]
    if q.dtype != torch.float32:
        stride = STRIDE if keys.shape[1] >= MANY_KEYS and rows > STRIDE * group else 1
        some = torch.baddbmm(spread(start[..., ::stride]), queries, keys[:, ::stride].transpose(1, 2), alpha=scale)
        near = some.amax(-1)
        near.masked_fill_(near == float("-inf"), 0)  # a narrow window may hold none of them
        start = start - near.view(n, heads, -1, group, 1)
    scores = torch.baddbmm(spread(start), queries, keys.transpose(1, 2), alpha=scale)
    return _unfold(torch.bmm(torch.softmax(scores, -1), values).view(n, heads, rows, -1), q)


def explicit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, distance: Tensor | None, layer: AttentionLayer) -> Tensor:
    """Attention whose scores are bent, biased or joined by a sink; mask: [n, num_queries, num_keys].

    In float32: scores change before anything can be subtracted from them, and near a cap 8 bits are too few.
    distance: [n, num_queries, num_keys], of the key from the query; for biases.
    """
    _, num_queries, heads, group, _ = q.shape
    scores = torch.matmul(_fold(q).float(), k.float().transpose(2, 3)).mul_(layer.scale)
    if layer.soft_cap is not None:
        scores.div_(layer.soft_cap).tanh_().mul_(layer.soft_cap)
    slopes, sinks, bias = (layer.extras.get(name) for name in ("alibi_slopes", "sinks", "distance_bias"))
    if slopes is not None:
        assert distance is not None, "the plan of biased layers has distances"
        slope = slopes.view(1, heads, 1, group, 1)
        scores += (distance[:, None, :, None] * slope).flatten(2, 3)
    if bias is not None:
        assert distance is not None, "the plan of biased layers has distances"
        behind = distance.neg().clamp_(0, bias.shape[1] - 1).long()
        added = bias[:, behind].view(heads, group, *behind.shape)  # [heads, group, n, num_queries, num_keys]
        scores += added.permute(2, 0, 3, 1, 4).flatten(2, 3)
    scores += fused_mask(mask, group)
    if sinks is not None:
        sink = sinks.view(1, heads, 1, group, 1).expand(q.shape[0], -1, num_queries, -1, -1).flatten(2, 3)
        scores = torch.cat((scores, sink.float()), -1)
    weights = torch.softmax(scores, -1)
    if sinks is not None:
        weights = weights[..., :-1]
    return _unfold(torch.matmul(weights, v.float()).to(q.dtype), q)


def _fold(q: Tensor) -> Tensor:
    """[n, kv_heads, num_queries * group, head_size]"""
    return q.transpose(1, 2).flatten(2, 3)


def _unfold(out: Tensor, q: Tensor) -> Tensor:
    n, queries, heads, group, _ = q.shape
    return out.view(n, heads, queries, group, -1).transpose(1, 2)
