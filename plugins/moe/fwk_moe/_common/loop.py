"""Experts one after another, each on the tokens that chose it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fwk_layers import gated

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.moe import ExpertLayer, MoEContext


class LayerLoop:
    """gate_up and down of each expert as linear layers, in whatever weight format."""

    def __init__(self, context: MoEContext, layers: Sequence[tuple[ExpertLayer, ExpertLayer]]) -> None:
        self._gated, self._experts = gated(context.activation), layers

    def apply(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """``MoERunner.apply``."""
        # Pairs of token and expert, sorted by expert; the order in which a token's experts are added is always theirs.
        chosen, pairs = expert_ids.flatten().sort(stable=True)
        tokens = pairs // expert_ids.shape[1]
        factors = weights.to(x.dtype).flatten()[pairs].unsqueeze(-1)
        out = torch.zeros_like(x)
        ids, counts = chosen.unique_consecutive(return_counts=True)
        start = 0
        for expert, count in zip(ids.tolist(), counts.tolist(), strict=True):
            if 0 <= expert < len(self._experts):  # others are other ranks'
                rows = tokens[start : start + count]
                gate_up, down = self._experts[expert]
                gate, up = gate_up(x[rows]).chunk(2, dim=-1)
                inner = self._gated(gate, up)
                out.index_add_(0, rows, down(inner).mul_(factors[start : start + count]))
            start += count
        return out
