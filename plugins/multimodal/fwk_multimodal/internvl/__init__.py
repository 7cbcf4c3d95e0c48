"""Images for InternVL: cut into tiles of the nearest proportions, with a small copy of the whole."""

from fwk import MultimodalProcessorSpec, hookimpl
from fwk.interfaces.declaration import Needs


@hookimpl
def multimodal_processors() -> list[MultimodalProcessorSpec]:
    return [
        MultimodalProcessorSpec(
            name="internvl",
            api=2,
            load="fwk_multimodal.internvl.processor:InternVLProcessor",
            architectures=("InternVLForConditionalGeneration",),
            kinds=frozenset({"image"}),
            needs=Needs(packages=("pillow>=11",)),
            summary="Up to a dozen tiles of an image, in rows and columns near its own proportions.",
        )
    ]
