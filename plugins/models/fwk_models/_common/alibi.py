"""Attention with linear biases (arXiv:2108.12409): a slope for each head instead of positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fwk_layers import Part
from fwk_layers.sharding import output_shard

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext


def slopes(context: ModelContext, factor: float = 1.0) -> dict[str, Tensor]:
    """``Attention.extras`` with the slopes of this rank's heads, in float32.

    They fall from 2^(-8 / n) by that factor; where n is no power of two, the missing ones stand between those of 2n.
    """
    heads = context.config.num_heads
    whole = 2 ** (heads.bit_length() - 1)
    found = [2.0 ** (-8 * (i + 1) / whole) for i in range(whole)]
    found += [2.0 ** (-8 * (2 * i + 1) / (2 * whole)) for i in range(heads - whole)]
    mine = output_shard(Part("attention", heads, heads), context.tp).range(heads)
    return {"alibi_slopes": torch.tensor(found)[mine.start : mine.stop].mul(factor).to(context.device)}
