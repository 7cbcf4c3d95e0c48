"""GPT-NeoX: Pythia and others."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.config import Config, ConfiguredSpec, with_rope

DEFAULTS: dict[str, dict[str, Any]] = {
    "GPTNeoXForCausalLM": {
        "vocab_size": 50_432, "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
        "intermediate_size": 24_576, "hidden_act": "gelu", "max_position_embeddings": 2048, "layer_norm_eps": 1e-5,
        "eos_token_id": 2, "tie_word_embeddings": False, "use_parallel_residual": True, "attention_bias": True,
        "rotary_pct": 0.25, "rotary_emb_base": 10000.0,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


class NeoXSpec(ConfiguredSpec):
    """Reads the older names of the rotary settings."""

    def derived(self, config: Config, architecture: str) -> Config:
        older = {"partial_rotary_factor": config["rotary_pct"], "rope_theta": config["rotary_emb_base"]}
        return with_rope({**config, **older})


@hookimpl
def models() -> list[ModelSpec]:
    return [
        NeoXSpec(
            name="gpt_neox",
            load="fwk_models.gpt_neox.model:GPTNeoX",
            architectures=("GPTNeoXForCausalLM",),
            defaults=DEFAULTS,
            summary="Attention and MLP side by side, rotary positions on a part of each head.",
        ),
    ]
