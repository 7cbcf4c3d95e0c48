"""GPT-NeoX: Pythia and others."""

from collections.abc import Mapping
from typing import Any

from fwk import ModelSpec, hookimpl


class NeoXSpec(ModelSpec):
    """Reads the older names of the rotary settings."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        older = {"partial_rotary_factor": raw.get("rotary_pct"), "rope_theta": raw.get("rotary_emb_base")}
        if raw.get("rope_parameters"):
            return raw
        return {**{name: value for name, value in older.items() if value is not None}, **raw}


@hookimpl
def models() -> list[ModelSpec]:
    return [
        NeoXSpec(
            name="gpt_neox",
            load="fwk_models.gpt_neox.model:GPTNeoX",
            architectures=("GPTNeoXForCausalLM",),
            summary="Attention and MLP side by side, rotary positions on a part of each head.",
        ),
    ]
