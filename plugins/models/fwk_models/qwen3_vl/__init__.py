"""Qwen3-VL (arXiv:2511.21631), dense and with experts: images of any size, at several depths of the encoder."""

from collections.abc import Mapping
from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.config import Config
from fwk_models._common.nested import PlanesSpec

TEXT: dict[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 128_000, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_act": "silu", "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False, "decoder_sparse_step": 1,
    "moe_intermediate_size": 1408, "num_experts_per_tok": 4, "num_experts": 60,
}  # fmt: skip
EYES: dict[str, Any] = {
    "depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304, "num_heads": 16,
    "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584,
    "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip
"""What transformers' classes have where a file says nothing."""


class Qwen3VLSpec(PlanesSpec):
    """Qwen3's config, nested."""

    theta = 500_000.0

    def vision(self, raw: Mapping[str, Any], architecture: str) -> Config:
        return {**EYES, **raw}


@hookimpl
def models() -> list[ModelSpec]:
    return [
        Qwen3VLSpec(
            name="qwen3_vl",
            load="fwk_models.qwen3_vl.model:Qwen3VL",
            architectures=("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
            defaults={"Qwen3VLForConditionalGeneration": TEXT, "Qwen3VLMoeForConditionalGeneration": EXPERTS},
            names={"num_experts": ("num_local_experts", "num_experts")},
            media=frozenset({"image", "video"}),
            summary="Qwen3's decoder with positions of three planes; images are read at several depths of an encoder.",
        )
    ]
