"""Images and videos for the Qwen-VL family: whole, in a size near their own."""

from fwk import MultimodalProcessorSpec, hookimpl
from fwk.interfaces.declaration import Needs


@hookimpl
def multimodal_processors() -> list[MultimodalProcessorSpec]:
    return [
        MultimodalProcessorSpec(
            name="qwen_vl",
            api=2,
            load="fwk_multimodal.qwen_vl.processor:QwenProcessor",
            architectures=(
                "Qwen2VLForConditionalGeneration",
                "Qwen2_5_VLForConditionalGeneration",
                "Qwen3VLForConditionalGeneration",
                "Qwen3VLMoeForConditionalGeneration",
                "Qwen3_5ForConditionalGeneration",
                "Qwen3_5MoeForConditionalGeneration",
            ),
            kinds=frozenset({"image", "video"}),
            needs=Needs(packages=("pillow>=11",)),
            summary="Patches of an image scaled to a multiple of theirs, with the rows and columns of its tokens.",
        )
    ]
