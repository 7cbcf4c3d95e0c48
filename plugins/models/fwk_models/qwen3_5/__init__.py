"""Qwen3.5, dense and with experts: Qwen3-Next's shape with projections of their own. Images are not taken."""

from collections.abc import Mapping
from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.nested import language_model


class Qwen35Spec(ModelSpec):
    """The language model of a model that also sees is in ``text_config``."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        raw = language_model(raw)
        if raw.get("layer_types") is not None:
            return raw
        every, count = raw.get("full_attention_interval", 4), raw.get("num_hidden_layers", 0)
        kinds = ["linear_attention" if (index + 1) % every else "full_attention" for index in range(count)]
        return {"partial_rotary_factor": 0.25, **raw, "layer_types": kinds}


@hookimpl
def models() -> list[ModelSpec]:
    return [
        Qwen35Spec(
            name="qwen3_5",
            load="fwk_models.qwen3_5.model:Qwen35",
            architectures=(
                "Qwen3_5ForCausalLM",
                "Qwen3_5MoeForCausalLM",
                "Qwen3_5ForConditionalGeneration",
                "Qwen3_5MoeForConditionalGeneration",
            ),
            is_recurrent=True,
            summary="Gated delta rules in most layers, gated attention in the others; text only.",
        )
    ]
