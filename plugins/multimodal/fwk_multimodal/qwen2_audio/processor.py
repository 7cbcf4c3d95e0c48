"""Sounds of a prompt for Qwen2-Audio, as transformers' ``Qwen2AudioProcessor`` makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from fwk.errors import InvalidRequest, ModelLoadError
from fwk.interfaces.multimodal import MediaItem, MultimodalContext, MultimodalProcessor, Placed, PlacedMedia
from fwk_multimodal._common.scaling import naming_fields
from fwk_multimodal._common.sound import FRAME, HOP, RATE, decode, log_mel

WORKS_WITH = {"sampling_rate": RATE, "hop_length": HOP, "n_fft": FRAME, "padding_value": 0.0, "dither": 0.0}
"""Of preprocessor_config.json, what the spectrogram is made with."""


class Qwen2AudioProcessor(MultimodalProcessor):
    """Replaces each sound's place by as many tokens as the encoder makes of it."""

    def __init__(self, context: MultimodalContext) -> None:
        super().__init__(context)
        config = context.processor_config
        for name, value in WORKS_WITH.items():
            if config.get(name, value) != value:
                raise ModelLoadError(
                    f"preprocessor_config.json: {name!r} is {config[name]!r}; sounds are heard with {value!r}"
                )
        with naming_fields():
            self._seconds = int(config.get("chunk_length", 30))
            self._bins = int(config.get("feature_size", 80))
            if not 0 < self._seconds <= 300 or not 0 < self._bins <= 1024:
                raise ValueError("chunk_length must be 1 to 300 seconds, feature_size 1 to 1024")
        audio = cast("Mapping[str, Any]", context.config.raw["audio_config"])
        if (bins := int(audio.get("num_mel_bins", 128))) != self._bins:
            raise ModelLoadError(f"preprocessor_config.json makes {self._bins} bins, and the model hears {bins}")
        self._sound = context.config.integer("audio_token_index", 151_646, 0)

    def process(self, token_ids: list[int], items: Sequence[MediaItem]) -> Placed:
        count = token_ids.count(self._sound)
        if count != len(items):
            raise InvalidRequest(
                f"the prompt has places for {count} sounds, and there are {len(items)}: the chat template must show "
                "each of them once",
                "messages",
            )
        out: list[int] = []
        media: list[PlacedMedia] = []
        for token in token_ids:
            if token != self._sound:
                out.append(token)
                continue
            arrays, length = self._heard(items[len(media)])
            media.append(PlacedMedia(len(media), len(out), length, arrays))
            out += [token] * length
        return Placed(out, media)

    def _heard(self, item: MediaItem) -> tuple[dict[str, np.ndarray], int]:
        """The spectrogram as far as its sound goes, with the frame behind, and how many tokens it takes."""
        samples = decode(item, self._seconds)
        num_frames = -(-len(samples) // HOP)
        num_places = (num_frames - 1) // 2 + 1
        if num_places < 2:
            raise InvalidRequest(f"{item.name}: the sound is shorter than 30 milliseconds", item.name)
        whole = np.zeros(self._seconds * RATE, np.float32)
        whole[: len(samples)] = samples
        seen = log_mel(whole, self._bins)[:, : 2 * num_places + 1]
        return {"spectrogram": np.ascontiguousarray(seen)}, (num_places - 2) // 2 + 1
