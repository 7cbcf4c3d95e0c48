"""Mixture-of-experts kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fwk.errors import ModelLoadError
from fwk.interfaces.declaration import Declaration, Facts
from fwk.interfaces.native import NO_THREADS, NativeThreads

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fwk.interfaces.native import NativeLinear
    from fwk.interfaces.quant import PackedNumbers

    ExpertLayer = Callable[[Tensor], Tensor]

EXPERT_PARALLEL = "expert_parallel"
"""Among ``MoERunnerSpec.offers``: the runner leaves out experts that other ranks compute (``MoEContext.ep_size``)."""


GRAPH_CAPTURE = "graph_capture"
"""The same: ``apply`` launches the same work whatever experts are chosen, so steps can be captured on a device."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens choose their experts: softmax over all of them, then the best ``top_k``.

    normalises: the weights of a token's experts are made to sum to one.
    scale: factor on the weights.
    num_groups, top_groups: experts come only from the groups whose best expert is among the best (DeepSeek-V2).
    in_float32: whether the router multiplies in float32, whatever the model's dtype.
    is_sigmoid: scores are each expert's own sigmoid instead of a softmax over all.
    has_correction: ``gate.e_score_correction_bias`` is added to the scores that choose, not to those that weigh; a
        group is then as good as its best two experts (DeepSeek-V3).

    - ``num_experts``: of the layer, on all ranks.
    """

    num_experts: int
    top_k: int
    normalises: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    in_float32: bool = False
    is_sigmoid: bool = False
    has_correction: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ModelLoadError(f"each token cannot have {self.top_k} of {self.num_experts} experts")
        if not 1 <= self.top_groups <= self.num_groups or self.num_experts % self.num_groups:
            raise ModelLoadError(
                f"{self.num_experts} experts cannot be routed to {self.top_groups} of {self.num_groups} equal groups"
            )
        if self.has_correction and self.num_experts // self.num_groups < 2:
            raise ModelLoadError(f"{self.num_experts} experts in {self.num_groups} groups: a group needs two of them")
        if self.top_k > self.num_experts // self.num_groups * self.top_groups:
            raise ModelLoadError(
                f"each token cannot have {self.top_k} experts out of {self.top_groups} of {self.num_groups} groups"
            )

    def choose(self, logits: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Router logits [num_tokens, num_experts] to expert ids and float32 weights, [num_tokens, top_k] each.

        correction: [num_experts] float32, where the routing has one.
        """
        import torch  # noqa: PLC0415 - declarations import this module, and are light

        scores: Tensor = logits.float().sigmoid() if self.is_sigmoid else torch.softmax(logits, -1, dtype=torch.float32)
        ranks: Tensor = scores if correction is None else scores + correction
        if self.top_groups < self.num_groups:
            groups = ranks.view(-1, self.num_groups, self.num_experts // self.num_groups)
            worth = groups.amax(-1) if correction is None else groups.topk(2, -1).values.sum(-1)
            best = worth.topk(self.top_groups, -1).indices
            is_out = torch.ones(groups.shape[:-1], dtype=torch.bool, device=scores.device).scatter_(-1, best, False)
            ranks = groups.masked_fill(is_out.unsqueeze(-1), 0.0 if correction is None else -torch.inf).flatten(-2)
        ids = ranks.topk(self.top_k, -1).indices
        weights = scores.gather(-1, ids)
        if self.normalises:
            weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if self.is_sigmoid else 0.0))
        return ids, weights * self.scale if self.scale != 1.0 else weights


@dataclass(frozen=True, slots=True)
class MoEContext:
    """What a runner is built with, one per MoE layer. Sizes are this rank's. ``threads`` runs native operators.

    ep_size: by how many the layer's experts are divided, ``num_experts`` to each rank or group of ranks; more than one
        only of runners that offer ``EXPERT_PARALLEL``.
    is_deterministic: a token's numbers must be the same to the bit, independent of the other tokens; only asked of
        runners that offer ``deterministic``.

    - ``top_k``: experts of a token.
    - ``hidden_size``: numbers in a token.
    - ``intermediate_size``: of one expert, this rank's part.
    - ``activation``: as in config.json: ``fwk_layers.activation`` knows it
    - ``dtype``: of activations.
    - ``device``: the worker's.
    - ``options``: the plugin's own options, validated; None where it declares none.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: str
    dtype: torch.dtype
    device: torch.device
    options: Any = None
    threads: NativeThreads = NO_THREADS
    is_deterministic: bool = False
    ep_size: int = 1


class ExpertWeights(ABC):
    """The experts of one layer. A runner reads them once, in the form it computes with."""

    @abstractmethod
    def layers(self, expert: int) -> tuple[ExpertLayer, ExpertLayer]:
        """gate_up and down of one expert as linear layers, in whatever weight format the run uses.

        gate_up: [n, hidden_size] to [n, 2 * intermediate_size], gate first; down: back to [n, hidden_size].
        """

    def native(self, layer: ExpertLayer, num_slices: int) -> list[NativeLinear] | None:
        """A layer of ``layers`` for a native operator, in up to ``num_slices`` parts of its outputs.

        None where its weight format has no native kernel; it must be kept while these are used.
        """
        return None

    @property
    def is_plain(self) -> bool:
        """Whether the run keeps all of them as plain numbers, which ``stacked`` gives."""
        return True

    def packed(self, expert: int) -> tuple[PackedNumbers, PackedNumbers]:
        """gate_up and down of one expert as the run's weight format packs them, where it does not keep plain numbers.

        gate_up: [2 * intermediate_size, hidden_size]; down: [hidden_size, intermediate_size]. Raises ``ModelLoadError``
        when the format has no such form.
        """
        raise ModelLoadError("these experts have no packed numbers for other kernels")

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
        Where ``ep_size`` is more than one, ids that are not in ``range(num_experts)``, negative ones among them, are of
        experts on other ranks: they are not computed and add nothing, and a token may have no others.
        """


MoERunnerFactory = Callable[[MoEContext], MoERunner]


@dataclass(frozen=True, kw_only=True)
class MoERunnerSpec(Declaration):
    """Declares a MoE runner (``--moe-runner-backend``)."""

    family: ClassVar[str] = "moe"

    def refusal(self, facts: Facts) -> str | None:
        if facts.ep_size > 1 and EXPERT_PARALLEL not in self.offers:
            return (
                f"computes all experts of a layer, and --expert-parallel-size {facts.ep_size} leaves others to other "
                "ranks"
            )
        return super().refusal(facts)
