"""Images for Idefics3 and SmolVLM: cut into tiles, with a small copy of the whole."""

from fwk import MultimodalProcessorSpec, hookimpl
from fwk.interfaces.declaration import Needs


@hookimpl
def multimodal_processors() -> list[MultimodalProcessorSpec]:
    return [
        MultimodalProcessorSpec(
            name="idefics3",
            api=2,
            load="fwk_multimodal.idefics3.processor:Idefics3Processor",
            architectures=("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
            kinds=frozenset({"image"}),
            needs=Needs(packages=("pillow>=11",)),
            summary="Tiles of an image and a small copy of it, each between tokens that say where it belongs.",
        )
    ]
