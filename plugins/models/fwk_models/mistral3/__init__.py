"""Mistral Small 3.1 and its kin: Mistral's decoder that reads images of any size by Pixtral's encoder."""

from collections.abc import Mapping
from typing import Any

from fwk import ModelSpec, hookimpl
from fwk.errors import ModelLoadError
from fwk_models._common.nested import PIXTRAL, vision_of
from fwk_models._common.text_config import with_text


class Mistral3Spec(ModelSpec):
    """``ModelSpec`` for a config whose text model's is nested."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        eyes = vision_of(raw, "mistral3", PIXTRAL, "pixtral")
        if (layer := raw.get("vision_feature_layer", -1)) != -1:
            raise ModelLoadError(f"config.json: 'vision_feature_layer' is {layer!r}; mistral3 is served with -1")
        found = with_text(raw, "mistral3", ("mistral", "llama"), ties=True, asks_text=False)
        return {**found, "vision_config": eyes}


@hookimpl
def models() -> list[ModelSpec]:
    return [
        Mistral3Spec(
            name="mistral3",
            load="fwk_models.mistral3.model:Mistral3",
            architectures=("Mistral3ForConditionalGeneration",),
            media=frozenset({"image"}),
            summary="Mistral's decoder and Pixtral's encoder of images in their own size, whose patches are merged.",
        )
    ]
