"""Qwen3.5 (Qwen team 2026): Qwen3-Next's layers, whose inputs have matrices of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from fwk.interfaces.model import ModelContext
from fwk_layers import ColumnParallelLinear, GatedMLP, Part
from fwk_models._common.delta import DeltaNet
from fwk_models._common.experts import gated_shared_experts
from fwk_models._common.gated_hybrid import GatedHybrid
from fwk_models._common.images import SeesPatches
from fwk_models._common.patches import LEARNED_GRID_MERGER, Eyes, with_learned_grid
from fwk_models._common.weights import StackedExperts

if TYPE_CHECKING:
    from torch import Tensor

    from fwk_models._common.stack import Apply


class SplitDeltaNet(DeltaNet):
    """Its inputs are four matrices: q, k and v; z; beta's; the decay's."""

    def make_inputs(self, context: ModelContext, prefix: str, hidden: int) -> None:
        sizes = self.sizes
        segments = ((sizes.keys, sizes.num_keys),) * 2 + ((sizes.values, sizes.num_keys),)
        parts = [
            Part(f"{prefix}.in_proj_qkv", 2 * sizes.keys + sizes.values, segments=segments),
            Part(f"{prefix}.in_proj_z", sizes.values, sizes.num_keys),
            Part(f"{prefix}.in_proj_b", sizes.num_values, sizes.num_keys),
            Part(f"{prefix}.in_proj_a", sizes.num_values, sizes.num_keys),
        ]
        self.joined = ColumnParallelLinear(context, parts, hidden)

    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mixed, z, b, a = self.joined(x).split(self.joined.out_features, -1)
        return mixed, z, b, a


class Qwen35(GatedHybrid):
    """Token ids to hidden states to logits."""

    delta = SplitDeltaNet

    def mlp(self, context: ModelContext, prefix: str, index: int) -> Apply:
        if not context.config.num_experts:
            return GatedMLP(context, prefix)
        gate_up, down = (f"{prefix}.experts.{name}_proj" for name in ("gate_up", "down"))
        if context.weights.has(gate_up):
            view = StackedExperts(context.weights, prefix, context.config.num_experts, gate_up, down)
            context = replace(context, weights=view)
        return gated_shared_experts(context, prefix, normalises=True)


class SeeingQwen35(SeesPatches, Qwen35):
    """The same, and rows of images."""

    sections = (11, 11, 10)
    is_striped = True
    merger = LEARNED_GRID_MERGER

    def __init__(self, context: ModelContext) -> None:
        nested = context.weights.has("model.language_model.embed_tokens.weight")
        super().__init__(context, "model.language_model" if nested else "model")
        self.open_eyes(context, "model.visual")

    def eyes(self, context: ModelContext) -> Eyes:
        return with_learned_grid(cast("Mapping[str, Any]", context.config.raw["vision_config"]))
