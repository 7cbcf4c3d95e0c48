"""GPT-2."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.config import ConfiguredSpec

DEFAULTS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {
        "vocab_size": 50_257, "max_position_embeddings": 1024, "hidden_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True, "eos_token_id": 50_256, "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ConfiguredSpec(
            name="gpt2",
            load="fwk_models.gpt2.model:GPT2",
            architectures=("GPT2LMHeadModel",),
            defaults=DEFAULTS,
            names={
                "hidden_size": ("n_embd",),
                "num_hidden_layers": ("n_layer",),
                "num_attention_heads": ("n_head",),
                "max_position_embeddings": ("n_positions",),
            },
            summary="Learned positions, layer norms, an MLP without gate.",
        ),
    ]
