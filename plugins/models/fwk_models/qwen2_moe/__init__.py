"""Qwen1.5-MoE and Qwen2-MoE."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.config import Config, ConfiguredSpec, every_nth, number_of, with_rope

DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen2MoeForCausalLM": {
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_act": "silu", "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": 4096,
        "max_window_layers": 28, "decoder_sparse_step": 1, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_experts": 60, "norm_topk_prob": False,
        "qkv_bias": True,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


class Qwen2MoeSpec(ConfiguredSpec):
    """Of the layers before ``max_window_layers`` every second has a window, where windows are used at all."""

    def derived(self, config: Config, architecture: str) -> Config:
        uses = bool(config["use_sliding_window"])
        if config.get("layer_types") is None:
            count, windows = number_of(config, "num_hidden_layers"), number_of(config, "max_window_layers", 0)
            kinds = every_nth(count, 2) if uses else ["full_attention"] * count
            config["layer_types"] = [*kinds[:windows], *["full_attention"] * (count - windows)]
        return with_rope({**config, "sliding_window": config["sliding_window"] if uses else None})


@hookimpl
def models() -> list[ModelSpec]:
    return [
        Qwen2MoeSpec(
            name="qwen2_moe",
            load="fwk_models.qwen2_moe.model:Qwen2Moe",
            architectures=("Qwen2MoeForCausalLM",),
            defaults=DEFAULTS,
            optional=frozenset({"layer_types"}),
            summary="Qwen2's shape; routed experts, and a shared one whose part each token sets.",
        )
    ]
