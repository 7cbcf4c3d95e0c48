"""OPT."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.config import ConfiguredSpec

DEFAULTS: dict[str, dict[str, Any]] = {
    "OPTForCausalLM": {
        "vocab_size": 50_272, "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072,
        "max_position_embeddings": 2048, "do_layer_norm_before": True, "_remove_final_layer_norm": False,
        "num_attention_heads": 12, "activation_function": "relu", "eos_token_id": 2, "enable_bias": True,
        "layer_norm_elementwise_affine": True, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ConfiguredSpec(
            name="opt",
            load="fwk_models.opt.model:OPT",
            architectures=("OPTForCausalLM",),
            defaults=DEFAULTS,
            summary="Learned positions, layer norms, an MLP without gate.",
        ),
    ]
