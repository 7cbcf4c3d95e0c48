"""Qwen3-Next: delta rules in most layers, gated attention in the others, experts in all."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.config import Config, ConfiguredSpec, with_attention_interval, with_rope

DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen3NextForCausalLM": {
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False, "head_dim": 256,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "decoder_sparse_step": 1,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10,
        "num_experts": 512, "norm_topk_prob": True, "partial_rotary_factor": 0.25, "full_attention_interval": 4,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


class Qwen3NextSpec(ConfiguredSpec):
    """Kinds of layers may be given by how far attention layers stand apart."""

    def derived(self, config: Config, architecture: str) -> Config:
        return with_rope(with_attention_interval(config))


@hookimpl
def models() -> list[ModelSpec]:
    return [
        Qwen3NextSpec(
            name="qwen3_next",
            load="fwk_models.qwen3_next.model:Qwen3Next",
            architectures=("Qwen3NextForCausalLM",),
            defaults=DEFAULTS,
            optional=frozenset({"layer_types"}),
            only={"hidden_act": ("silu", "swish")},
            is_recurrent=True,
            summary="Gated delta rules in most layers, gated attention in the others; routed and shared experts.",
        )
    ]
