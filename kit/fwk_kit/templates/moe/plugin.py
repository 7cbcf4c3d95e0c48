"""The experts one after the other, each on the tokens that chose it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fwk.interfaces.moe import ExpertWeights, MoERunner
from fwk_layers import activation

if TYPE_CHECKING:
    from torch import Tensor


class MineRunner(MoERunner):
    """Experts as linear layers, in whatever weight format the run uses."""

    def load(self, experts: ExpertWeights) -> None:
        self._experts = [experts.layers(index) for index in range(self.context.num_experts)]
        self._activation = activation(self.context.activation)

    def apply(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in sorted(set(expert_ids.flatten().tolist())):
            if expert not in range(self.context.num_experts):
                continue  # another rank computes it
            tokens, places = torch.nonzero(expert_ids == expert, as_tuple=True)
            gate_up, down = self._experts[expert]
            gate, up = gate_up(x[tokens]).chunk(2, dim=-1)
            out[tokens] += down(self._activation(gate) * up) * weights[tokens, places, None].to(x.dtype)
        return out
