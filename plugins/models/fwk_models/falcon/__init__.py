"""Falcon."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fwk import ModelSpec, hookimpl
from fwk.interfaces.model import AttentionNeeds
from fwk.types import ModelConfig


class FalconSpec(ModelSpec):
    """Counts K/V heads as the kinds of Falcon do; asks for slopes where positions are such."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        heads = raw.get("num_attention_heads") or raw.get("n_head")
        if raw.get("new_decoder_architecture"):
            shared = raw.get("num_kv_heads") or raw.get("n_head_kv") or heads
        else:
            shared = 1 if raw.get("multi_query", True) else heads
        inner = raw.get("ffn_hidden_size")
        return {**raw, "num_key_value_heads": shared, **({"intermediate_size": inner} if inner else {})}

    def attention_needs(self, config: ModelConfig) -> AttentionNeeds:
        needs = super().attention_needs(config)
        return replace(needs, features=needs.features | {"alibi_slopes"}) if config.raw.get("alibi") else needs


@hookimpl
def models() -> list[ModelSpec]:
    return [
        FalconSpec(
            name="falcon",
            load="fwk_models.falcon.model:Falcon",
            architectures=(
                "FalconForCausalLM",
                "RWForCausalLM",
            ),
            summary="Attention and MLP side by side; one K/V head or groups of them; rotary positions or slopes.",
        ),
    ]
