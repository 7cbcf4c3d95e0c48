"""Idefics3 (Laurencon et al. 2024, arXiv:2408.12637), and SmolVLM: a Llama that reads images, cut into tiles."""

from collections.abc import Mapping
from typing import Any

from fwk import ModelSpec, hookimpl
from fwk_models._common.nested import llama_with_images

EYES: dict[str, Any] = {
    "hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_channels": 3, "image_size": 224, "patch_size": 32, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip
"""What transformers' class of ``vision_config`` has where a file says nothing."""


class Idefics3Spec(ModelSpec):
    """``ModelSpec`` for a config whose text model's is nested."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        return llama_with_images(raw, "idefics3", EYES)


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
