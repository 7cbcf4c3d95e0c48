"""StarCoder2."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.config import ConfiguredSpec

DEFAULTS: dict[str, dict[str, Any]] = {
    "Starcoder2ForCausalLM": {
        "vocab_size": 49_152, "hidden_size": 3072, "intermediate_size": 12_288, "num_hidden_layers": 30,
        "num_attention_heads": 24, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096, "norm_epsilon": 1e-5, "eos_token_id": 50_256, "use_bias": True,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ConfiguredSpec(
            name="starcoder2",
            load="fwk_models.starcoder2.model:Starcoder2",
            architectures=("Starcoder2ForCausalLM",),
            defaults=DEFAULTS,
            optional=frozenset({"sliding_window"}),
            summary="Rotary positions, layer norms, an MLP without gate, a window.",
        ),
    ]
