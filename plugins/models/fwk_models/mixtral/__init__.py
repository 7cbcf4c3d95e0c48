"""Mixtral: Mistral's shape with experts."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.config import ConfiguredSpec

DEFAULTS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "eos_token_id": 2, "tie_word_embeddings": False, "num_experts_per_tok": 2,
        "num_local_experts": 8, "rope_theta": 1000000.0,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ConfiguredSpec(
            name="mixtral",
            load="fwk_models.mixtral.model:Mixtral",
            architectures=("MixtralForCausalLM",),
            defaults=DEFAULTS,
            optional=frozenset({"sliding_window"}),
            names={"num_local_experts": ("num_experts", "num_local_experts")},
            summary="Llama's shape; in place of each MLP a mixture of experts.",
        )
    ]
