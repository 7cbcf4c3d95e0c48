"""BLOOM."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.config import ConfiguredSpec

DEFAULTS: dict[str, dict[str, Any]] = {
    "BloomForCausalLM": {
        "vocab_size": 250_880, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
        "layer_norm_epsilon": 1e-5, "eos_token_id": 2, "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ConfiguredSpec(
            name="bloom",
            load="fwk_models.bloom.model:Bloom",
            architectures=("BloomForCausalLM",),
            defaults=DEFAULTS,
            names={
                "hidden_size": ("n_embed", "hidden_size"),
                "num_hidden_layers": ("n_layer",),
                "num_attention_heads": ("n_head",),
            },
            features=frozenset({"alibi_slopes"}),
            summary="Slopes instead of positions, layer norms, an MLP without gate.",
        ),
    ]
