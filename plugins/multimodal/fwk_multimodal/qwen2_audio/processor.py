"""Sounds of a prompt for Qwen2-Audio, as transformers' ``Qwen2AudioProcessor`` makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from fwk.errors import InvalidRequest
from fwk.interfaces.multimodal import (
    MediaItem,
    MultimodalContext,
    MultimodalProcessor,
    Placed,
    PlacedMedia,
    PreparedItem,
)
from fwk_multimodal._common.sound import HOP, decode
from fwk_multimodal._common.spectrograms import SoundWindow


class Qwen2AudioProcessor(MultimodalProcessor):
    """Replaces each sound's place by as many tokens as the encoder makes of it."""

    def __init__(self, context: MultimodalContext) -> None:
        super().__init__(context)
        audio = cast("Mapping[str, Any]", context.config.raw["audio_config"])
        self._window = SoundWindow(context.processor_config, int(audio.get("num_mel_bins", 128)))
        self._sound = context.config.integer("audio_token_index", 151_646, 0)

    def prepare(self, item: MediaItem) -> PreparedItem:
        arrays, length = self._heard(item)
        return PreparedItem([length], [arrays])

    def place(self, token_ids: list[int], items: Sequence[MediaItem], prepared: Sequence[PreparedItem]) -> Placed:
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
            media.append(prepared[len(media)].piece(len(media), 0, len(out)))
            out += [token] * media[-1].length
        return Placed(out, media)

    def _heard(self, item: MediaItem) -> tuple[dict[str, np.ndarray], int]:
        """The spectrogram as far as its sound goes, with the frame behind, and how many tokens it takes."""
        samples = decode(item, self._window.seconds)
        num_frames = -(-len(samples) // HOP)
        num_places = (num_frames - 1) // 2 + 1
        if num_places < 2:
            raise InvalidRequest(f"{item.name}: the sound is shorter than 30 milliseconds", item.name)
        seen = self._window.spectrogram(samples)[:, : 2 * num_places + 1]
        return {"spectrogram": np.ascontiguousarray(seen)}, (num_places - 2) // 2 + 1
