"""LFM2: short convolutions in most layers, attention in the others."""

from collections.abc import Mapping
from typing import Any

from fwk import ModelSpec, hookimpl


class Lfm2Spec(ModelSpec):
    """Its config names the norms' epsilon, the tie and the layers' kinds otherwise."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        found = {"rms_norm_eps": raw.get("norm_eps", 1e-5), "tie_word_embeddings": raw.get("tie_embedding", True)}
        if raw.get("layer_types") is None:
            full = raw.get("full_attn_idxs")
            count = raw.get("num_hidden_layers", 0)
            found["layer_types"] = [
                "full_attention" if full is None or index in full else "conv" for index in range(count)
            ]
        return {**found, **raw}


@hookimpl
def models() -> list[ModelSpec]:
    return [
        Lfm2Spec(
            name="lfm2",
            load="fwk_models.lfm2.model:Lfm2",
            architectures=("Lfm2ForCausalLM",),
            is_recurrent=True,
            summary="Gated short convolutions in most layers, attention in the others.",
        )
    ]
