"""Qwen3-VL: what its encoder makes of an image half way is added behind the decoder's first layers (DeepStack)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from fwk.errors import ModelLoadError
from fwk.interfaces.model import ModelContext
from fwk_layers import GatedMLP, MoE, Routing
from fwk_models._common.attention import NormedAttention
from fwk_models._common.decoder import DecoderLayer
from fwk_models._common.experts import is_sparse, num_experts
from fwk_models._common.images import SeeingDecoder
from fwk_models._common.patches import LEARNED_GRID_MERGER, Eyes, blocks_of, number, with_learned_grid
from fwk_models._common.weights import StackedExperts

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch


WITH_EXPERTS = "Qwen3VLMoeForConditionalGeneration"


def experts(context: ModelContext, prefix: str) -> MoE:
    """Those of a layer, in two tensors, which published files and those of transformers 5 write either way."""
    config = context.config
    count, inner = num_experts(config), config.integer("moe_intermediate_size")
    names = (f"{prefix}.experts.{name}_proj" for name in ("gate_up", "down"))
    view = StackedExperts(context.weights, prefix, count, *names, is_transposed=None)
    routing = Routing(count, config.integer("num_experts_per_tok"), normalises=True)
    return MoE(replace(context, weights=view), prefix, routing, intermediate_size=inner)


class Qwen3VL(SeeingDecoder):
    """Token ids, and rows of images, to hidden states to logits."""

    sections = (24, 20, 20)
    is_striped = True
    merger = LEARNED_GRID_MERGER

    def __init__(self, context: ModelContext) -> None:
        self.size = context.config.hidden_size
        super().__init__(context)

    def make_layer(self, context: ModelContext, index: int) -> DecoderLayer:
        config = context.config
        bias = bool(config.raw.get("attention_bias", False))
        has_experts = config.architecture == WITH_EXPERTS and is_sparse(config, index)
        return DecoderLayer(
            context,
            index,
            lambda prefix: NormedAttention(context, self.rotary, prefix, index, bias=bias),
            lambda prefix: experts(context, prefix) if has_experts else GatedMLP(context, prefix),
            self.root,
        )

    def eyes(self, context: ModelContext) -> Eyes:
        vision = cast("Mapping[str, Any]", context.config.raw["vision_config"])
        deep = blocks_of(vision, "deepstack_visual_indexes", number(vision, "depth"))
        if 0 < context.config.num_layers <= len(deep):
            raise ModelLoadError(
                "config.json: vision_config's 'deepstack_visual_indexes' are not fewer than the decoder's layers"
            )
        return with_learned_grid(vision, deep)

    def forward(self, batch: ForwardBatch) -> Tensor:
        inserted = batch.inserted
        if inserted is None:
            return super().forward(batch)
        x = self.embedding(batch.token_ids)
        first, *deep = inserted.values.to(x.dtype).split(self.size, -1)
        x = x.index_copy(0, inserted.rows, first)
        rows = self.angles(batch)
        residual = None
        for index, layer in enumerate(self.layers):
            x, residual = layer(x, residual, rows, batch)
            if index < len(deep):
                x = x.index_add(0, inserted.rows, deep[index])
        return self.norm.add(x, residual)[0]
