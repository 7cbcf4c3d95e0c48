"""Mamba-2 and Codestral Mamba: no attention, and a state of one size however long a sequence is."""

from collections.abc import Mapping
from typing import Any

from fwk import ModelSpec, hookimpl


class Mamba2Spec(ModelSpec):
    """Its config has no attention heads and no limit of positions."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        heads = {"num_attention_heads": raw.get("num_heads", 128), "head_dim": raw.get("head_dim", 64)}
        return {"max_position_embeddings": 2**20, **raw, **heads}


@hookimpl
def models() -> list[ModelSpec]:
    return [
        Mamba2Spec(
            name="mamba2",
            load="fwk_models.mamba2.model:Mamba2",
            architectures=("Mamba2ForCausalLM",),
            is_recurrent=True,
            summary="State spaces instead of attention: memory does not grow with the sequence.",
        )
    ]
