"""Llama 4, text only."""

from collections.abc import Mapping
from typing import Any

from fwk import ModelSpec, hookimpl
from fwk.errors import ModelLoadError
from fwk_models._common.nested import language_model


class Llama4Spec(ModelSpec):
    """The language model is in ``text_config``. Most layers see a chunk of the text only: one chunk is served."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        raw = language_model(raw)
        if raw.get("num_experts_per_tok", 1) != 1:
            raise ModelLoadError(
                f"config.json: num_experts_per_tok {raw['num_experts_per_tok']}: Llama 4 gives each token one expert"
            )
        longest, chunk = raw.get("max_position_embeddings", 131_072), raw.get("attention_chunk_size") or 2**30
        count, every = raw.get("num_hidden_layers", 0), raw.get("no_rope_layer_interval", 4)
        found = {
            "max_position_embeddings": min(longest, chunk),
            "layer_types": ["full_attention"] * count,
            "no_rope_layers": raw.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)],
        }
        if raw.get("moe_layers") is None:
            step = raw.get("interleave_moe_layer_step", 1)
            found["moe_layers"] = list(range(step - 1, count, step))
        return {**raw, **found}


@hookimpl
def models() -> list[ModelSpec]:
    return [
        Llama4Spec(
            name="llama4",
            load="fwk_models.llama4.model:Llama4",
            architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
            summary="A shared and one routed expert; some layers without positions; contexts of one chunk; text only.",
        )
    ]
