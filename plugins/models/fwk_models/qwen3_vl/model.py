"""Qwen3-VL: what its encoder makes of an image half way is added behind the decoder's first layers (DeepStack)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from fwk.errors import ModelLoadError
from fwk.interfaces.model import ModelContext
from fwk.layers import GatedMLP
from fwk_models._common.attention import NormedAttention
from fwk_models._common.decoder import Decoder, DecoderLayer
from fwk_models._common.images import SeesPatches
from fwk_models._common.patches import Eyes, blocks_of, number

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch


class Qwen3VL(SeesPatches, Decoder):
    """Token ids, and rows of images, to hidden states to logits."""

    sections = (24, 20, 20)
    is_striped = True
    merger = ("norm", "linear_fc1", "linear_fc2")

    def __init__(self, context: ModelContext) -> None:
        self.size = context.config.hidden_size
        super().__init__(context)

    def make_layer(self, context: ModelContext, index: int) -> DecoderLayer:
        bias = bool(context.config.raw.get("attention_bias", False))
        return DecoderLayer(
            context,
            index,
            lambda prefix: NormedAttention(context, self.rotary, prefix, index, bias=bias),
            lambda prefix: GatedMLP(context, prefix),
            self.root,
        )

    def eyes(self, context: ModelContext) -> Eyes:
        vision = cast("Mapping[str, Any]", context.config.raw["vision_config"])
        depth = number(vision, "depth")
        deep = blocks_of(vision, "deepstack_visual_indexes", depth)
        if len(deep) >= context.config.num_layers:
            raise ModelLoadError(
                "config.json: vision_config's 'deepstack_visual_indexes' are not fewer than the decoder's layers"
            )
        positions = number(vision, "num_position_embeddings")
        if round(positions**0.5) ** 2 != positions:
            raise ModelLoadError("config.json: vision_config's 'num_position_embeddings' is no square")
        return Eyes(
            hidden=number(vision, "hidden_size"),
            inner=number(vision, "intermediate_size"),
            depth=depth,
            num_heads=number(vision, "num_heads"),
            channels=number(vision, "in_channels"),
            patch=number(vision, "patch_size"),
            merge=number(vision, "spatial_merge_size"),
            times=number(vision, "temporal_patch_size"),
            out=number(vision, "out_hidden_size"),
            act=str(vision["hidden_act"]),
            mlp=("linear_fc1", "linear_fc2"),
            has_patch_bias=True,
            num_positions=positions,
            deep=deep,
        )

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
