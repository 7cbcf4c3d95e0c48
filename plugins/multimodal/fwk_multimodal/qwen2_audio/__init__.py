"""Sounds for Qwen2-Audio: a token for each 40 milliseconds."""

from fwk import MultimodalProcessorSpec, hookimpl


@hookimpl
def multimodal_processors() -> list[MultimodalProcessorSpec]:
    return [
        MultimodalProcessorSpec(
            name="qwen2_audio",
            api=2,
            load="fwk_multimodal.qwen2_audio.processor:Qwen2AudioProcessor",
            architectures=("Qwen2AudioForConditionalGeneration",),
            kinds=frozenset({"audio"}),
            summary="Log-mel spectrograms of sounds of up to 30 seconds.",
        )
    ]
