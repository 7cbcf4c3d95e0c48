"""Images for Gemma 3: whole, as a square, and perhaps parts of long ones."""

from fwk import MultimodalProcessorSpec, hookimpl
from fwk.interfaces.declaration import Needs


@hookimpl
def multimodal_processors() -> list[MultimodalProcessorSpec]:
    return [
        MultimodalProcessorSpec(
            name="gemma3_vl",
            api=2,
            load="fwk_multimodal.gemma3.processor:Gemma3Processor",
            architectures=("Gemma3ForConditionalGeneration",),
            kinds=frozenset({"image"}),
            needs=Needs(packages=("pillow>=11",)),
            summary="An image as a square of 256 tokens; where pan and scan is on, parts of a long one behind it.",
        )
    ]
