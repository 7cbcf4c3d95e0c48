"""Baichuan 1 and 2."""

from collections.abc import Mapping
from typing import Any

from fwk import ModelSpec, hookimpl


class BaichuanSpec(ModelSpec):
    """The larger ones have slopes instead of positions, and only their size says so."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        longest = raw.get("max_position_embeddings") or raw.get("model_max_length") or 4096
        return {**raw, "max_position_embeddings": longest, "has_slopes": raw.get("hidden_size", 0) > 4096}


@hookimpl
def models() -> list[ModelSpec]:
    return [
        BaichuanSpec(
            name="baichuan",
            load="fwk_models.baichuan.model:Baichuan",
            architectures=("BaichuanForCausalLM", "BaiChuanForCausalLM"),
            summary="Llama's shape with Q, K and V in one matrix; 13B has slopes, Baichuan 2 a normalised head.",
        )
    ]
