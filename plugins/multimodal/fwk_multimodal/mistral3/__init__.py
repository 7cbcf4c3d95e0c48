"""Images for Mistral 3: whole, in a size near their own, row by row."""

from fwk import MultimodalProcessorSpec, hookimpl
from fwk.interfaces.declaration import Needs


@hookimpl
def multimodal_processors() -> list[MultimodalProcessorSpec]:
    return [
        MultimodalProcessorSpec(
            name="mistral3",
            api=2,
            load="fwk_multimodal.mistral3.processor:Mistral3Processor",
            architectures=("Mistral3ForConditionalGeneration",),
            kinds=frozenset({"image"}),
            needs=Needs(packages=("pillow>=11",)),
            summary="An image scaled to whole squares of patches, with a token behind each row of them.",
        )
    ]
