"""Qwen2-VL (arXiv:2409.12191) and Qwen2.5-VL (arXiv:2502.13923): Qwen2 that reads images of any size."""

from collections.abc import Mapping
from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.config import Config, with_later_windows
from fwk_models._common.nested import PlanesSpec

TEXT: dict[str, Any] = {
    "vocab_size": 152_064, "hidden_size": 8192, "intermediate_size": 29_568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 80, "eos_token_id": 151_645,
}  # fmt: skip
EYES: dict[str, dict[str, Any]] = {
    "Qwen2VLForConditionalGeneration": {
        "depth": 32, "embed_dim": 1280, "hidden_size": 3584, "hidden_act": "quick_gelu", "mlp_ratio": 4,
        "num_heads": 16, "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
    "Qwen2_5_VLForConditionalGeneration": {
        "depth": 32, "hidden_size": 3584, "hidden_act": "silu", "intermediate_size": 3420, "num_heads": 16,
        "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
        "out_hidden_size": 3584, "fullatt_block_indexes": [7, 15, 23, 31],
    },
}  # fmt: skip
"""What transformers' classes have where a file says nothing."""


class Qwen2VLSpec(PlanesSpec):
    """Qwen2's config, nested or with the eyes' in it."""

    theta = 1e6
    asks_text = True

    def vision(self, raw: Mapping[str, Any], architecture: str) -> Config:
        return {**EYES[architecture], **raw}

    def derived(self, config: Config, architecture: str) -> Config:
        return super().derived({**with_later_windows(config), "text_kind": "qwen2"}, architecture)


@hookimpl
def models() -> list[ModelSpec]:
    return [
        Qwen2VLSpec(
            name="qwen2_vl",
            load="fwk_models.qwen2_vl.model:Qwen2VL",
            architectures=tuple(EYES),
            defaults=dict.fromkeys(EYES, TEXT),
            optional=frozenset({"layer_types"}),
            media=frozenset({"image", "video"}),
            summary="Qwen2's decoder with positions of three planes, and an encoder of images and videos of any size.",
        )
    ]
