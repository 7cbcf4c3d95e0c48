"""Windows of sound for Whisper: a token for each 20 milliseconds of 30 seconds, and what the decoder begins with."""

from fwk import MultimodalProcessorSpec, hookimpl


@hookimpl
def multimodal_processors() -> list[MultimodalProcessorSpec]:
    return [
        MultimodalProcessorSpec(
            name="whisper",
            api=2,
            load="fwk_multimodal.whisper.processor:WhisperProcessor",
            architectures=("WhisperForConditionalGeneration",),
            kinds=frozenset({"audio"}),
            summary="The log-mel spectrogram of a window of 30 seconds.",
        )
    ]
