"""Mixture-of-experts kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fwk.interfaces.declaration import Declaration

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    ExpertLayer = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class MoEContext:
    """What a runner is built with, one per MoE layer. Sizes are this rank's."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: str  # as in config.json: ``fwk.layers.activation`` knows it
    dtype: torch.dtype
    device: torch.device
    options: Any = None


class ExpertWeights(ABC):
    """The experts of one layer. A runner reads them once, in the form it computes with."""

    @abstractmethod
    def layers(self, expert: int) -> tuple[ExpertLayer, ExpertLayer]:
        """gate_up and down of one expert as linear layers, in whatever weight format the run uses.

        gate_up: [n, hidden_size] to [n, 2 * intermediate_size], gate first; down: back to [n, hidden_size].
        """

    @abstractmethod
    def stacked(self) -> tuple[Tensor, Tensor]:
        """All experts as plain numbers, for a fused kernel.

        gate_up: [num_experts, 2 * intermediate_size, hidden_size]; down: [num_experts, hidden_size,
        intermediate_size]. Raises ``ModelLoadError`` when the run's weights are not plain.
        """


class MoERunner(ABC):
    """Runs the experts of one layer."""

    def __init__(self, context: MoEContext) -> None:
        self.context = context

    @abstractmethod
    def load(self, experts: ExpertWeights) -> None:
        """Read the weights; called once, before ``apply``."""

    @abstractmethod
    def apply(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts: [num_tokens, hidden_size], of this rank's part of them.

        x: [num_tokens, hidden_size], unchanged; expert_ids: [num_tokens, top_k] int64, no expert twice for a token;
        weights: [num_tokens, top_k] float32. What a token gets must not depend on the tokens alongside it.
        """


MoERunnerFactory = Callable[[MoEContext], MoERunner]


@dataclass(frozen=True, kw_only=True)
class MoERunnerSpec(Declaration):
    """Declares a MoE runner (``--moe-runner-backend``)."""

    family: ClassVar[str] = "moe"
