"""Qwen3-Next: delta rules in most layers, gated attention in the others, experts in all."""

from collections.abc import Mapping
from typing import Any

from fwk import ModelSpec, hookimpl


class Qwen3NextSpec(ModelSpec):
    """Kinds of layers may be given by how far attention layers stand apart."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        if raw.get("layer_types") is not None:
            return raw
        every, count = raw.get("full_attention_interval", 4), raw.get("num_hidden_layers", 0)
        kinds = ["linear_attention" if (index + 1) % every else "full_attention" for index in range(count)]
        return {**raw, "layer_types": kinds}


@hookimpl
def models() -> list[ModelSpec]:
    return [
        Qwen3NextSpec(
            name="qwen3_next",
            load="fwk_models.qwen3_next.model:Qwen3Next",
            architectures=("Qwen3NextForCausalLM",),
            is_recurrent=True,
            summary="Gated delta rules in most layers, gated attention in the others; routed and shared experts.",
        )
    ]
