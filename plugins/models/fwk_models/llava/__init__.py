"""LLaVA 1.5 (Liu et al. 2023, arXiv:2310.03744): a Llama that reads images through CLIP's encoder."""

from collections.abc import Mapping
from typing import Any

from fwk import ModelSpec, hookimpl
from fwk.errors import ModelLoadError
from fwk_models._common.nested import llama_with_images

EYES: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_channels": 3, "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
}  # fmt: skip
"""What transformers' class of ``vision_config`` has where a file says nothing."""


class LlavaSpec(ModelSpec):
    """``ModelSpec`` for a config whose text model's is nested."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        found = llama_with_images(raw, "llava", EYES, asks_text=True)
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
