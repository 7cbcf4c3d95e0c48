"""LLaVA-OneVision (Li et al. 2024, arXiv:2408.03326): a Qwen2 that reads images, whole and in tiles, by SigLIP."""

from collections.abc import Mapping
from typing import Any

from fwk import ModelSpec, hookimpl
from fwk.errors import ModelLoadError
from fwk_models._common.nested import SIGLIP, vision_of
from fwk_models._common.text_config import with_text

EYES: dict[str, Any] = {
    **SIGLIP, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 14, "image_size": 384,
    "num_hidden_layers": 26, "num_attention_heads": 16,
}  # fmt: skip
"""What transformers' class has where there is no ``vision_config``, and SigLIP's where one does not say."""


class OneVisionSpec(ModelSpec):
    """``ModelSpec`` for a config whose text model's is nested."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        raw = {**raw, "vision_config": raw.get("vision_config") or EYES}
        eyes = vision_of(raw, "llava_onevision", SIGLIP, "siglip_vision_model")
        if (given := raw.get("vision_feature_select_strategy", "full")) != "full":
            raise ModelLoadError(
                f"config.json: 'vision_feature_select_strategy' is {given!r}; llava_onevision is served with 'full'"
            )
        found = with_text(raw, "llava_onevision", ("qwen2", "qwen3", "llama"), ties=False, asks_text=True)
        return {**found, "vision_config": eyes}


@hookimpl
def models() -> list[ModelSpec]:
    return [
        OneVisionSpec(
            name="llava_onevision",
            load="fwk_models.llava_onevision.model:OneVision",
            architectures=("LlavaOnevisionForConditionalGeneration",),
            media=frozenset({"image"}),
            summary="Qwen2's decoder and SigLIP's encoder of images, whole and in tiles of the nearest proportions.",
        )
    ]
