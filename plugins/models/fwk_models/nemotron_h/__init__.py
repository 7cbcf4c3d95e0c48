"""Nemotron-H: Mamba-2, attention without positions and plain MLPs, one to a layer."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.config import Config, ConfiguredSpec

DEFAULTS: dict[str, dict[str, Any]] = {
    "NemotronHForCausalLM": {
        "vocab_size": 131_072, "hidden_size": 4096, "tie_word_embeddings": False, "eos_token_id": 2,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
        "intermediate_size": 21_504, "mlp_hidden_act": "relu2", "mlp_bias": False, "ssm_state_size": 128,
        "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4, "time_step_min": 0.001,
        "use_conv_bias": True, "use_bias": False, "layer_norm_epsilon": 1e-5,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""By the letters of ``hybrid_override_pattern``."""
PATTERN = "ME*-"
"""Of a file that names no layers."""


class NemotronHSpec(ConfiguredSpec):
    """Layers are named one by one or by the letters of a pattern, and nothing else says how many there are."""

    def derived(self, config: Config, architecture: str) -> Config:
        pattern = str(config.get("hybrid_override_pattern", PATTERN))
        kinds = config.get("layers_block_type") or [KINDS.get(letter, letter) for letter in pattern]
        renamed = {"mamba": "linear_attention", "attention": "full_attention"}
        kinds = [renamed.get(kind, kind) for kind in kinds]
        found = {name: value for name, value in config.items() if name != "n_routed_experts" or "moe" in kinds}
        eps = config["layer_norm_epsilon"]
        return {**found, "layer_types": kinds, "num_hidden_layers": len(kinds), "rms_norm_eps": eps}


@hookimpl
def models() -> list[ModelSpec]:
    return [
        NemotronHSpec(
            name="nemotron_h",
            load="fwk_models.nemotron_h.model:NemotronH",
            architectures=("NemotronHForCausalLM",),
            defaults=DEFAULTS,
            optional=frozenset({"sliding_window"}),
            names={
                "layers_block_type": ("layer_types", "layers_block_type"),
                "n_groups": ("mamba_n_groups", "n_groups"),
                "conv_kernel": ("mamba_d_conv", "conv_kernel"),
                "time_step_min": ("mamba_dt_min", "time_step_min"),
                "use_conv_bias": ("mamba_conv_bias", "use_conv_bias"),
            },
            only={"attention_bias": (False,), "mamba_hidden_act": ("silu", "swish"), "sliding_window": (0,)},
            is_recurrent=True,
            summary="State spaces, attention without positions or an MLP in each layer.",
        )
    ]
