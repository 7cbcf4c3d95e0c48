"""Granite, dense and with experts, and MiniCPM: Llama's shape with factors on its parts."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.config import ConfiguredSpec

DEFAULTS: dict[str, dict[str, Any]] = {
    "GraniteForCausalLM": {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "eos_token_id": 2, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
        "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0,
    },
    "GraniteMoeForCausalLM": {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "eos_token_id": 2, "tie_word_embeddings": False, "attention_bias": False, "embedding_multiplier": 1.0,
        "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ConfiguredSpec(
            name="granite",
            load="fwk_models.granite.model:Granite",
            architectures=(
                "GraniteForCausalLM",
                "GraniteMoeForCausalLM",
            ),
            defaults=DEFAULTS,
            summary="Llama's shape with factors on embedding, scores, stream and logits; the MLP may be experts.",
        ),
        ConfiguredSpec(
            name="minicpm",
            load="fwk_models.granite.model:MiniCPM",
            architectures=("MiniCPMForCausalLM",),
            defaults=DEFAULTS,
            summary="Llama's shape with factors on embedding, stream and logits.",
        ),
    ]
