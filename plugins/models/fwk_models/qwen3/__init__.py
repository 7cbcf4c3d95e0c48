"""Qwen3, dense and with experts."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.config import Config, ConfiguredSpec, with_later_windows, with_rope
from fwk_models._common.text_config import TABLES

DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": TABLES["qwen3"],
    "Qwen3MoeForCausalLM": {
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
        "num_attention_heads": 32, "num_key_value_heads": 4, "hidden_act": "silu", "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False, "use_sliding_window": False,
        "sliding_window": 4096, "decoder_sparse_step": 1, "moe_intermediate_size": 768, "num_experts_per_tok": 8,
        "num_experts": 128, "norm_topk_prob": False,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


class Qwen3Spec(ConfiguredSpec):
    """Windows are in the later layers, with experts in all."""

    def derived(self, config: Config, architecture: str) -> Config:
        if architecture == "Qwen3ForCausalLM":
            return with_rope(with_later_windows(config))
        window = config["sliding_window"] if config["use_sliding_window"] else None
        return with_rope({**config, "sliding_window": window})


@hookimpl
def models() -> list[ModelSpec]:
    return [
        Qwen3Spec(
            name="qwen3",
            load="fwk_models.qwen3.model:Qwen3",
            architectures=("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
            defaults=DEFAULTS,
            optional=frozenset({"layer_types"}),
            names={"num_experts": ("num_local_experts", "num_experts")},
            summary="Llama's shape with normalised queries and keys; the MLP may be a mixture of experts.",
        )
    ]
