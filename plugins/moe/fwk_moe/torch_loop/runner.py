"""Experts one after another, each on the tokens that chose it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.interfaces.moe import ExpertWeights, MoERunner
from fwk_moe._common.loop import LayerLoop

if TYPE_CHECKING:
    from torch import Tensor


class TorchRunner(MoERunner):
    """Each expert's two linear layers, in whatever weight format the run uses."""

    def load(self, experts: ExpertWeights) -> None:
        self._loop = LayerLoop(self.context, [experts.layers(index) for index in range(self.context.num_experts)])

    def apply(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        return self._loop.apply(x, expert_ids, weights)
