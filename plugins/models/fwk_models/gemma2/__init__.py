"""Gemma and Gemma 2."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fwk import ModelSpec, hookimpl
from fwk.interfaces.model import AttentionNeeds
from fwk.types import ModelConfig


class Gemma2Spec(ModelSpec):
    """Asks for soft caps where the config has one; says which layers have windows, as older configs do not."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        if raw.get("layer_types") or not raw.get("sliding_window"):
            return raw
        kinds = ("sliding_attention", "full_attention")
        return {**raw, "layer_types": [kinds[i % 2] for i in range(int(raw.get("num_hidden_layers") or 0))]}

    def attention_needs(self, config: ModelConfig) -> AttentionNeeds:
        needs = super().attention_needs(config)
        if config.raw.get("attn_logit_softcapping") is None:
            return needs
        return replace(needs, features=needs.features | {"soft_cap"})


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="gemma",
            load="fwk_models.gemma2.model:Gemma",
            architectures=("GemmaForCausalLM",),
            summary="Llama's shape with scaled embeddings and norms that add one.",
        ),
        Gemma2Spec(
            name="gemma2",
            load="fwk_models.gemma2.model:Gemma2",
            architectures=("Gemma2ForCausalLM",),
            summary="Windows in every second layer, soft caps on scores and logits.",
        ),
    ]
