"""Idefics3 (Laurencon et al. 2024, arXiv:2408.12637), and SmolVLM: a Llama that reads images, cut into tiles."""

from collections.abc import Mapping
from typing import Any

from fwk import ModelSpec, hookimpl
from fwk.errors import ModelLoadError


class Idefics3Spec(ModelSpec):
    """``ModelSpec`` for a config whose text model's is nested."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        text, vision = raw.get("text_config"), raw.get("vision_config")
        if not isinstance(text, Mapping) or not isinstance(vision, Mapping):
            raise ModelLoadError("config.json: 'text_config' and 'vision_config' must be objects")
        kind = text.get("model_type", "llama")
        if kind != "llama":
            raise ModelLoadError(f"config.json: text_config's 'model_type' is {kind!r}; idefics3 computes 'llama'")
        return {"rms_norm_eps": 1e-5, **raw, **text, "tie_word_embeddings": raw.get("tie_word_embeddings", False)} | {
            key: raw[key] for key in ("architectures", "eos_token_id", "dtype") if raw.get(key) is not None
        }


@hookimpl
def models() -> list[ModelSpec]:
    return [
        Idefics3Spec(
            name="idefics3",
            load="fwk_models.idefics3.model:Idefics3",
            architectures=("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
            media=frozenset({"image"}),
            summary="Llama's decoder and a SigLIP encoder of images, whose patches are joined and projected.",
        )
    ]
