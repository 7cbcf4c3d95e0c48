"""Mamba and Falcon Mamba: no attention, and a state of one size however long a sequence is."""

from collections.abc import Mapping
from typing import Any

from fwk import ModelSpec, hookimpl


class MambaSpec(ModelSpec):
    """Its config has no attention heads and no limit of positions; its head is the embedding by default."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"max_position_embeddings": 2**20, "tie_word_embeddings": True, **raw, "num_attention_heads": 1}


@hookimpl
def models() -> list[ModelSpec]:
    return [
        MambaSpec(
            name="mamba",
            load="fwk_models.mamba.model:Mamba",
            architectures=("MambaForCausalLM", "FalconMambaForCausalLM"),
            is_recurrent=True,
            summary="State spaces instead of attention, the first generation.",
        )
    ]
