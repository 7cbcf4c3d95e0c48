"""A window of sound for Whisper, as transformers' ``WhisperFeatureExtractor`` makes it."""

from __future__ import annotations

from collections.abc import Sequence

from fwk.errors import InvalidRequest, ModelLoadError
from fwk.interfaces.multimodal import MediaItem, MultimodalContext, MultimodalProcessor, Placed, PreparedItem
from fwk_multimodal._common.sound import HOP, RATE, decode
from fwk_multimodal._common.spectrograms import SoundWindow

MIN_SAMPLES = RATE // 100


class WhisperProcessor(MultimodalProcessor):
    """The encoder reads the window's rows, the decoder the prompt's tokens: those go first, and these behind them."""

    def __init__(self, context: MultimodalContext) -> None:
        super().__init__(context)
        config = context.config
        self._window = SoundWindow(context.processor_config, config.integer("num_mel_bins", 80))
        self._count = config.integer("max_source_positions", 1500)
        num_frames = self._window.seconds * RATE // HOP
        if num_frames != 2 * self._count:
            raise ModelLoadError(
                f"preprocessor_config.json makes windows of {num_frames} frames, and the model hears {2 * self._count}"
            )

    def prepare(self, item: MediaItem) -> PreparedItem:
        samples = decode(item, self._window.seconds)
        if len(samples) < MIN_SAMPLES:
            raise InvalidRequest(f"{item.name}: the sound is shorter than 10 milliseconds", item.name)
        return PreparedItem([self._count], [{"spectrogram": self._window.spectrogram(samples)}])

    def place(self, token_ids: list[int], items: Sequence[MediaItem], prepared: Sequence[PreparedItem]) -> Placed:
        if len(items) != 1:
            raise InvalidRequest(f"this model hears one sound at once, not {len(items)}", "messages")
        place = token_ids[:1] * self._count  # the decoder reads none of them
        return Placed([*place, *token_ids], [prepared[0].piece(0, 0, 0)])
