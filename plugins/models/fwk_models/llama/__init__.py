"""The Llama family: Llama, Mistral, Qwen2 and whatever shares their shape."""

from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.config import Config, ConfiguredSpec, with_later_windows, with_rope
from fwk_models._common.text_config import TABLES

DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": TABLES["llama"],
    "MistralForCausalLM": TABLES["mistral"],
    "Qwen2ForCausalLM": TABLES["qwen2"],
}
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
