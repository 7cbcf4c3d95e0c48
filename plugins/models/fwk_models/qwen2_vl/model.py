"""Qwen2-VL and Qwen2.5-VL: the encoder of the latter has windows, RMSNorm and gated MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from fwk.errors import ModelLoadError
from fwk.interfaces.model import ModelContext
from fwk_models._common.images import SeeingDecoder
from fwk_models._common.llama import LlamaDecoder
from fwk_models._common.patches import Eyes, blocks_of, number

OLD = "Qwen2VLForConditionalGeneration"


class Qwen2VL(SeeingDecoder, LlamaDecoder):
    """Token ids, and rows of images, to hidden states to logits."""

    sections = (16, 24, 24)
    merger = ("ln_q", "mlp.0", "mlp.2")

    def eyes(self, context: ModelContext) -> Eyes:
        vision = cast("Mapping[str, Any]", context.config.raw["vision_config"])
        is_old = context.config.architecture == OLD
        hidden = number(vision, "embed_dim" if is_old else "hidden_size")
        depth, patch, merge = (number(vision, name) for name in ("depth", "patch_size", "spatial_merge_size"))
        common: dict[str, Any] = {
            "hidden": hidden,
            "depth": depth,
            "num_heads": number(vision, "num_heads"),
            "channels": number(vision, "in_channels"),
            "patch": patch,
            "merge": merge,
            "times": number(vision, "temporal_patch_size"),
            "out": number(vision, "hidden_size" if is_old else "out_hidden_size"),
            "act": str(vision["hidden_act"]),
        }
        if is_old:
            return Eyes(**common, inner=int(hidden * float(vision["mlp_ratio"])), mlp=("fc1", "fc2"))
        window = number(vision, "window_size") // (patch * merge) * merge
        if not window:
            raise ModelLoadError("config.json: vision_config's 'window_size' is less than a square of patches")
        return Eyes(
            **common,
            inner=number(vision, "intermediate_size"),
            mlp=("gate_proj", "up_proj", "down_proj"),
            has_rms=True,
            window=window,
            whole_blocks=frozenset(blocks_of(vision, "fullatt_block_indexes", depth)),
        )
