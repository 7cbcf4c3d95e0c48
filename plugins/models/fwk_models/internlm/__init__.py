"""InternLM 2 and 3."""

from collections.abc import Mapping
from typing import Any

from fwk import ModelSpec, hookimpl


class InternLMSpec(ModelSpec):
    """Its biases go by other names."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            **raw,
            "output_bias": bool(raw.get("bias", False)),
            "input_bias": bool(raw.get("qkv_bias", raw.get("bias"))),
        }


@hookimpl
def models() -> list[ModelSpec]:
    return [
        InternLMSpec(
            name="internlm",
            load="fwk_models.internlm.model:InternLM",
            architectures=("InternLM2ForCausalLM", "InternLM3ForCausalLM"),
            summary="Llama's shape; InternLM 2 has Q, K and V of each K/V head in one matrix, and names of its own.",
        )
    ]
