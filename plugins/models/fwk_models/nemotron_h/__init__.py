"""Nemotron-H: Mamba-2, attention without positions and plain MLPs, one to a layer."""

from collections.abc import Mapping
from typing import Any

from fwk import ModelSpec, hookimpl

KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""By the letters of ``hybrid_override_pattern``."""


class NemotronHSpec(ModelSpec):
    """Layers are named one by one or by the letters of a pattern, and nothing else says how many there are."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        pattern = str(raw.get("hybrid_override_pattern") or "")
        kinds = raw.get("layers_block_type") or [KINDS.get(letter, letter) for letter in pattern]
        renamed = {"mamba": "linear_attention", "attention": "full_attention"}
        kinds = [renamed.get(kind, kind) for kind in kinds]
        found = {name: value for name, value in raw.items() if name != "n_routed_experts" or "moe" in kinds}
        eps = raw.get("layer_norm_epsilon", 1e-5)
        return {**found, "layer_types": kinds, "num_hidden_layers": len(kinds), "rms_norm_eps": eps}


@hookimpl
def models() -> list[ModelSpec]:
    return [
        NemotronHSpec(
            name="nemotron_h",
            load="fwk_models.nemotron_h.model:NemotronH",
            architectures=("NemotronHForCausalLM",),
            is_recurrent=True,
            summary="State spaces, attention without positions or an MLP in each layer.",
        )
    ]
