"""Granite 4: Mamba-2 in most layers, attention in the others, shared and routed experts."""

from collections.abc import Mapping
from typing import Any

from fwk import ModelSpec, hookimpl


class GraniteHybridSpec(ModelSpec):
    """Kinds of layers go by two names, and those of state spaces by two more."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        kinds = raw.get("layer_types") or raw.get("layers_block_type") or ["mamba"] * raw.get("num_hidden_layers", 0)
        full = ("attention", "full_attention")
        return {**raw, "layer_types": ["full_attention" if kind in full else "linear_attention" for kind in kinds]}


@hookimpl
def models() -> list[ModelSpec]:
    return [
        GraniteHybridSpec(
            name="granite_hybrid",
            load="fwk_models.granite_hybrid.model:GraniteHybrid",
            architectures=("GraniteMoeHybridForCausalLM",),
            is_recurrent=True,
            summary="State spaces in most layers, attention in the others; parts scaled, experts shared and routed.",
        )
    ]
