"""LLaVA 1.5 (Liu et al. 2023, arXiv:2310.03744): a Llama that reads images through CLIP's encoder."""

from collections.abc import Mapping
from typing import Any

from fwk import ModelSpec, hookimpl
from fwk.errors import ModelLoadError
from fwk_models._common.nested import llama_with_images


class LlavaSpec(ModelSpec):
    """``ModelSpec`` for a config whose text model's is nested."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        found = llama_with_images(raw, "llava")
        kind = found["vision_config"].get("model_type", "clip_vision_model")
        if kind != "clip_vision_model":
            raise ModelLoadError(
                f"config.json: vision_config's 'model_type' is {kind!r}; llava computes 'clip_vision_model'"
            )
        return found


@hookimpl
def models() -> list[ModelSpec]:
    return [
        LlavaSpec(
            name="llava",
            load="fwk_models.llava.model:Llava",
            architectures=("LlavaForConditionalGeneration",),
            media=frozenset({"image"}),
            summary="Llama's decoder and CLIP's encoder of images, with an MLP between them.",
        )
    ]
