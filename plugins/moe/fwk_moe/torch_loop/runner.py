"""Experts one after another, each on the tokens that chose it."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

from fwk.interfaces.moe import ExpertWeights, MoERunner
from fwk_moe._common.loop import LayerLoop

if TYPE_CHECKING:
    from torch import Tensor


logger = logging.getLogger(__name__)


class TorchRunner(MoERunner):
    """Each expert's two linear layers, in whatever weight format the run uses."""

    def load(self, experts: ExpertWeights) -> None:
        if self.context.device.type != "cpu":
            _tell_of_waits()
        self._loop = LayerLoop(self.context, [experts.layers(index) for index in range(self.context.num_experts)])

    def apply(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        return self._loop.apply(x, expert_ids, weights)


@functools.cache
def _tell_of_waits() -> None:
    """Once, not for each layer."""
    logger.warning(
        "experts run one after another, and in each layer the host waits for the device, so that no step is captured "
        "or launched ahead: --moe-runner-backend triton waits for nothing, but has not yet run on a GPU"
    )
