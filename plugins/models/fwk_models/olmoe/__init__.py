"""OLMoE."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.config import ConfiguredSpec

DEFAULTS: dict[str, dict[str, Any]] = {
    "OlmoeForCausalLM": {
        "vocab_size": 50_304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 16, "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "eos_token_id": 50_279, "tie_word_embeddings": False, "attention_bias": False, "num_experts_per_tok": 8,
        "num_experts": 64, "norm_topk_prob": False,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ConfiguredSpec(
            name="olmoe",
            load="fwk_models.olmoe.model:Olmoe",
            architectures=("OlmoeForCausalLM",),
            defaults=DEFAULTS,
            names={"num_experts": ("num_local_experts", "num_experts")},
            summary="Queries and keys normalised over all heads; in place of each MLP a mixture of experts.",
        )
    ]
