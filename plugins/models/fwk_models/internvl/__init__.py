"""InternVL 3 (arXiv:2504.10479) and 3.5: a language model that reads images, cut into tiles, by InternViT."""

from collections.abc import Mapping
from typing import Any, cast

from fwk import ModelSpec, hookimpl
from fwk.errors import ModelLoadError
from fwk_models._common.text_config import with_text

EYES: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "attention_bias": False,
    "use_qk_norm": False, "intermediate_size": 4096, "hidden_act": "gelu", "norm_type": "layer_norm",
    "layer_norm_eps": 1e-6, "image_size": [448, 448], "patch_size": [14, 14], "num_channels": 3,
    "use_absolute_position_embeddings": True, "use_mean_pooling": True,
}  # fmt: skip
"""What transformers' class of ``vision_config`` has where a file says nothing."""

SERVED = {
    "vision_feature_layer": -1, "vision_feature_select_strategy": "default", "projector_hidden_act": "gelu",
}  # fmt: skip


class InternVLSpec(ModelSpec):
    """``ModelSpec`` for a config whose text model's is nested."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        vision = raw.get("vision_config")
        if not isinstance(vision, Mapping):
            raise ModelLoadError("config.json: 'vision_config' must be an object")
        for name, value in SERVED.items():
            if raw.get(name, value) != value:
                raise ModelLoadError(f"config.json: {name!r} is {raw[name]!r}; internvl is served with {value!r}")
        found = with_text(raw, "internvl", ("qwen2", "qwen3", "llama"), ties=True, asks_text=False)
        return {**found, "vision_config": {**EYES, **cast("Mapping[str, Any]", vision)}}


@hookimpl
def models() -> list[ModelSpec]:
    return [
        InternVLSpec(
            name="internvl",
            load="fwk_models.internvl.model:InternVL",
            architectures=("InternVLForConditionalGeneration",),
            media=frozenset({"image"}),
            summary="Qwen2's, Qwen3's or Llama's decoder and InternViT, whose patches are joined and projected.",
        )
    ]
