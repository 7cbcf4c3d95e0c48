"""Granite 4: Mamba-2 in most layers, attention in the others, shared and routed experts."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.config import Config, ConfiguredSpec, number_of, with_rope

DEFAULTS: dict[str, dict[str, Any]] = {
    "GraniteMoeHybridForCausalLM": {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "eos_token_id": 2, "tie_word_embeddings": False, "attention_bias": False, "embedding_multiplier": 1.0,
        "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0, "num_local_experts": 8,
        "num_experts_per_tok": 2, "shared_intermediate_size": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1,
        "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


class GraniteHybridSpec(ConfiguredSpec):
    """Kinds of layers go by two names, and those of state spaces by two more."""

    def derived(self, config: Config, architecture: str) -> Config:
        kinds = config.get("layer_types") or ["mamba"] * number_of(config, "num_hidden_layers")
        full = ("attention", "full_attention")
        kinds = ["full_attention" if kind in full else "linear_attention" for kind in kinds]
        return with_rope({**config, "layer_types": kinds})


@hookimpl
def models() -> list[ModelSpec]:
    return [
        GraniteHybridSpec(
            name="granite_hybrid",
            load="fwk_models.granite_hybrid.model:GraniteHybrid",
            architectures=("GraniteMoeHybridForCausalLM",),
            defaults=DEFAULTS,
            optional=frozenset({"layer_types"}),
            names={
                "layer_types": ("layers_block_type", "layer_types"),
                "num_local_experts": ("num_experts", "num_local_experts"),
            },
            only={"hidden_act": ("silu", "swish")},
            is_recurrent=True,
            summary="State spaces in most layers, attention in the others; parts scaled, experts shared and routed.",
        )
    ]
