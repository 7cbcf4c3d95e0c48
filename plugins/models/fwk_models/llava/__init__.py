"""LLaVA 1.5 (Liu et al. 2023, arXiv:2310.03744), and Pixtral in its form: images by CLIP's or Pixtral's encoder."""

from collections.abc import Mapping
from typing import Any, cast

from fwk import ModelSpec, hookimpl
from fwk.errors import ModelLoadError
from fwk_models._common.nested import PIXTRAL, llama_with_images, vision_of
from fwk_models._common.text_config import with_text

EYES: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_channels": 3, "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
}  # fmt: skip
"""What transformers' class of ``vision_config`` has where a file says nothing."""


class LlavaSpec(ModelSpec):
    """``ModelSpec`` for a config whose text model's is nested."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        vision = cast("Mapping[str, Any]", raw.get("vision_config") or {})
        if isinstance(vision, Mapping) and vision.get("model_type") == "pixtral":
            return self._pixtral(raw)
        found = llama_with_images(raw, "llava", EYES, asks_text=True)
        kind = found["vision_config"].get("model_type", "clip_vision_model")
        if kind != "clip_vision_model":
            raise ModelLoadError(
                f"config.json: vision_config's 'model_type' is {kind!r}; llava computes 'clip_vision_model' or "
                "'pixtral'"
            )
        return {**found, "text_kind": "llama"}

    def _pixtral(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Pixtral 12B as transformers writes it."""
        eyes = vision_of(raw, "llava", PIXTRAL, "pixtral")
        served = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
        for (name, value), given in zip(served.items(), (-2, "default"), strict=True):
            if raw.get(name, given) != value:
                raise ModelLoadError(
                    f"config.json: {name!r} is {raw.get(name, given)!r}; llava is served with {value!r} for 'pixtral'"
                )
        found = with_text(raw, "llava", ("mistral", "llama"), ties=False, asks_text=True)
        return {**found, "vision_config": eyes}


@hookimpl
def models() -> list[ModelSpec]:
    return [
        LlavaSpec(
            name="llava",
            load="fwk_models.llava.model:Llava",
            architectures=("LlavaForConditionalGeneration",),
            media=frozenset({"image"}),
            summary="Llama's decoder and CLIP's encoder of images, or Mistral's and Pixtral's; an MLP is between them.",
        )
    ]
