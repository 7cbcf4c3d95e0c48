"""The Llama family: Llama, Mistral, Qwen2 and whatever shares their shape."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.config import Config, ConfiguredSpec, with_later_windows, with_rope
from fwk_models._common.nested import LLAMA

DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6, "eos_token_id": 2, "tie_word_embeddings": False, "sliding_window": 4096,
    },
    "Qwen2ForCausalLM": {
        "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu", "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": 4096,
        "max_window_layers": 28,
    },
}  # fmt: skip
"""What transformers' configuration classes have where a file says nothing."""


class LlamaSpec(ConfiguredSpec):
    """Qwen2 may have windows in its later layers."""

    def derived(self, config: Config, architecture: str) -> Config:
        return with_rope(with_later_windows(config) if architecture == "Qwen2ForCausalLM" else config)


@hookimpl
def models() -> list[ModelSpec]:
    return [
        LlamaSpec(
            name="llama",
            load="fwk_models.llama.model:Llama",
            architectures=("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"),
            defaults=DEFAULTS,
            summary="Decoder with RMSNorm, rotary positions, grouped-query attention and a gated MLP.",
        )
    ]
