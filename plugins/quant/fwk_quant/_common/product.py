"""Products with a matrix that is never whole: its rows are unpacked a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_VALUES = 2**20
"""Most values unpacked at a time, unless a single row has more: 4 MiB in float32, near a core's cache."""

DEVICE_CHUNK_VALUES = 2**26
"""On other devices, where each piece costs launches: 256 MiB in float32."""


def multiply(
    x: Tensor,
    size: tuple[int, int],
    dense: Callable[[int, int], Tensor],
    bias: Tensor | None,
    scale: Tensor | None = None,
) -> Tensor:
    """``x @ weight.T * scale + bias`` for a weight of ``size`` (out_features, in_features).

    dense: unpacks rows ``start`` to ``stop``, [stop - start, in_features] in x's dtype. scale: [out_features].
    x: [num_tokens, in_features] to [num_tokens, out_features].
    """
    out_features, in_features = size
    count = max(1, (CHUNK_VALUES if x.device.type == "cpu" else DEVICE_CHUNK_VALUES) // in_features)
    if count >= out_features:
        return _part(x, dense(0, out_features), bias, scale)
    y = x.new_empty(x.shape[0], out_features)
    for start in range(0, out_features, count):
        rows = slice(start, min(start + count, out_features))
        y[:, rows] = _part(
            x,
            dense(rows.start, rows.stop),
            None if bias is None else bias[rows],
            None if scale is None else scale[rows],
        )
    return y


def _part(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    if scale is None:
        return F.linear(x, weight, bias)
    y = F.linear(x, weight).mul_(scale)
    return y if bias is None else y.add_(bias)
