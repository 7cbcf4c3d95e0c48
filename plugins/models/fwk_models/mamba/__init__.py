"""Mamba and Falcon Mamba: no attention, and a state of one size however long a sequence is."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.config import Config, ConfiguredSpec

DEFAULTS: dict[str, dict[str, Any]] = {
    "MambaForCausalLM": {
        "vocab_size": 50_280, "hidden_size": 768, "state_size": 16, "num_hidden_layers": 32, "layer_norm_epsilon": 1e-5,
        "eos_token_id": 0, "expand": 2, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True,
        "hidden_act": "silu", "time_step_rank": "auto", "tie_word_embeddings": True,
    },
    "FalconMambaForCausalLM": {
        "vocab_size": 50_280, "hidden_size": 768, "state_size": 16, "num_hidden_layers": 32, "layer_norm_epsilon": 1e-5,
        "eos_token_id": 0, "expand": 2, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True,
        "hidden_act": "silu", "time_step_rank": "auto", "tie_word_embeddings": True, "mixer_rms_eps": 1e-6,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


class MambaSpec(ConfiguredSpec):
    """Its config has no attention heads and no limit of positions; its head is the embedding by default."""

    def derived(self, config: Config, architecture: str) -> Config:
        inner = int(config["expand"] * config["hidden_size"])  # a file that says it is right, as in transformers
        none = {"num_attention_heads": 1, "num_key_value_heads": 1}
        return {"max_position_embeddings": 2**20, "intermediate_size": inner, **config, **none}


@hookimpl
def models() -> list[ModelSpec]:
    return [
        MambaSpec(
            name="mamba",
            load="fwk_models.mamba.model:Mamba",
            architectures=("MambaForCausalLM", "FalconMambaForCausalLM"),
            defaults=DEFAULTS,
            is_recurrent=True,
            summary="State spaces instead of attention, the first generation.",
        )
    ]
