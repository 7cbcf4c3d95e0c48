"""Jamba: Mamba in most layers, attention without positions in some, experts in every second one."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk.errors import ModelLoadError
from fwk_models._common.config import Config, ConfiguredSpec

DEFAULTS: dict[str, dict[str, Any]] = {
    "JambaForCausalLM": {
        "vocab_size": 65_536, "tie_word_embeddings": False, "hidden_size": 4096, "intermediate_size": 14_336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "eos_token_id": 2, "max_position_embeddings": 262_144, "num_experts_per_tok": 2,
        "num_experts": 16, "expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 8,
        "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": "auto",
        "mamba_conv_bias": True, "mamba_proj_bias": False,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


class JambaSpec(ConfiguredSpec):
    """Which layers have attention is said by a period and an offset."""

    def derived(self, config: Config, architecture: str) -> Config:
        period, offset, count = (
            config[name] for name in ("attn_layer_period", "attn_layer_offset", "num_hidden_layers")
        )
        if not all(isinstance(value, int) for value in (period, offset, count)) or not 0 <= offset < period:
            raise ModelLoadError(
                f"config.json: attn_layer_offset {offset!r} and attn_layer_period {period!r} must be whole numbers, "
                "the offset less than the period"
            )
        kinds = ["full_attention" if i % period == offset else "linear_attention" for i in range(count)]
        return {**config, "layer_types": kinds}


@hookimpl
def models() -> list[ModelSpec]:
    return [
        JambaSpec(
            name="jamba",
            load="fwk_models.jamba.model:Jamba",
            architectures=("JambaForCausalLM",),
            defaults=DEFAULTS,
            names={"num_experts": ("num_local_experts", "num_experts")},
            is_recurrent=True,
            summary="State spaces, attention in every eighth layer, experts in every second.",
        )
    ]
