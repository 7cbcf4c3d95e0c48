"""Mixture-of-experts kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fwk.interfaces.declaration import Declaration

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class MoEContext:
    """What a runner is built with, one per MoE layer."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: str
    dtype: torch.dtype
    device: torch.device
    options: Any = None


class MoERunner(ABC):
    """Runs the experts of one layer."""

    def __init__(self, context: MoEContext) -> None:
        self.context = context

    @abstractmethod
    def load(self, gate_up: Tensor, down: Tensor) -> None:
        """gate_up: [num_experts, 2 * intermediate, hidden]; down: [num_experts, hidden, intermediate]."""

    @abstractmethod
    def apply(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """x: [num_tokens, hidden]; expert_ids, weights: [num_tokens, top_k]. Returns [num_tokens, hidden]."""


@dataclass(frozen=True, kw_only=True)
class MoERunnerSpec(Declaration):
    """Declares a MoE runner (``--moe-runner-backend``)."""

    family: ClassVar[str] = "moe"
