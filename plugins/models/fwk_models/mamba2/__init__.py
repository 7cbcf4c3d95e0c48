"""Mamba-2 and Codestral Mamba: no attention, and a state of one size however long a sequence is."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.config import Config, ConfiguredSpec

DEFAULTS: dict[str, dict[str, Any]] = {
    "Mamba2ForCausalLM": {
        "num_heads": 128, "head_dim": 64, "vocab_size": 32_768, "hidden_size": 4096, "state_size": 128,
        "num_hidden_layers": 64, "layer_norm_epsilon": 1e-5, "eos_token_id": 2, "conv_kernel": 4, "n_groups": 8,
        "use_bias": False, "use_conv_bias": True, "hidden_act": "silu", "tie_word_embeddings": False,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


class Mamba2Spec(ConfiguredSpec):
    """Its config has no attention heads and no limit of positions."""

    def derived(self, config: Config, architecture: str) -> Config:
        heads = {"num_attention_heads": config["num_heads"], "num_key_value_heads": config["num_heads"]}
        return {"max_position_embeddings": 2**20, **config, **heads}


@hookimpl
def models() -> list[ModelSpec]:
    return [
        Mamba2Spec(
            name="mamba2",
            load="fwk_models.mamba2.model:Mamba2",
            architectures=("Mamba2ForCausalLM",),
            defaults=DEFAULTS,
            only={"hidden_act": ("silu", "swish")},
            is_recurrent=True,
            summary="State spaces instead of attention: memory does not grow with the sequence.",
        )
    ]
