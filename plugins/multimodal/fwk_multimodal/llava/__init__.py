"""Images for LLaVA: the middle square of each."""

from fwk import MultimodalProcessorSpec, hookimpl
from fwk.interfaces.declaration import Needs


@hookimpl
def multimodal_processors() -> list[MultimodalProcessorSpec]:
    return [
        MultimodalProcessorSpec(
            name="llava",
            api=2,
            load="fwk_multimodal.llava.processor:LlavaProcessor",
            architectures=("LlavaForConditionalGeneration",),
            kinds=frozenset({"image"}),
            needs=Needs(packages=("pillow>=11",)),
            summary="The middle of an image, in the size that CLIP reads, and a token for each patch.",
        )
    ]
