"""Images for LLaVA-OneVision: whole, and cut into tiles of the nearest proportions."""

from fwk import MultimodalProcessorSpec, hookimpl
from fwk.interfaces.declaration import Needs


@hookimpl
def multimodal_processors() -> list[MultimodalProcessorSpec]:
    return [
        MultimodalProcessorSpec(
            name="llava_onevision",
            api=2,
            load="fwk_multimodal.llava_onevision.processor:OneVisionProcessor",
            architectures=("LlavaOnevisionForConditionalGeneration",),
            kinds=frozenset({"image"}),
            needs=Needs(packages=("pillow>=11",)),
            summary="An image in the encoder's size, and in tiles that it fits into with the least loss.",
        )
    ]
