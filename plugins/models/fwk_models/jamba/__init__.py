"""Jamba: Mamba in most layers, attention without positions in some, experts in every second one."""

from collections.abc import Mapping
from typing import Any

from fwk import ModelSpec, hookimpl
from fwk.errors import ModelLoadError


class JambaSpec(ModelSpec):
    """Which layers have attention is said by a period and an offset."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        period, offset, count = (
            raw.get(name, default)
            for name, default in (("attn_layer_period", 8), ("attn_layer_offset", 4), ("num_hidden_layers", 32))
        )
        if not all(isinstance(value, int) for value in (period, offset, count)) or not 0 <= offset < period:
            raise ModelLoadError(
                f"config.json: attn_layer_offset {offset!r} and attn_layer_period {period!r} must be whole numbers, "
                "the offset less than the period"
            )
        kinds = ["full_attention" if i % period == offset else "linear_attention" for i in range(count)]
        return {**raw, "layer_types": kinds}


@hookimpl
def models() -> list[ModelSpec]:
    return [
        JambaSpec(
            name="jamba",
            load="fwk_models.jamba.model:Jamba",
            architectures=("JambaForCausalLM",),
            is_recurrent=True,
            summary="State spaces, attention in every eighth layer, experts in every second.",
        )
    ]
