"""Qwen2-Audio: sounds to rows by Whisper's encoder, pairs of which are averaged, normalised and projected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from fwk.interfaces.model import ModelContext
from fwk_layers import LayerNorm, ReplicatedLinear
from fwk_models._common.nested_text import NestedDecoder
from fwk_models._common.sound import EPS, SoundEncoder, pairs
from fwk_models._common.vision import whole

if TYPE_CHECKING:
    from torch import Tensor


class Qwen2Audio(NestedDecoder):
    """Token ids, and rows of sounds, to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self.ears = Ears(context, self.outer) if context.encodes("audio") else None
        if self.ears is None:
            self.skip(context, "audio_tower.", "multi_modal_projector.")

    def encode(self, kind: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """Of sounds, ``spectrogram`` [num_bins, 2 * n + 1] each: [n / 2, hidden_size]."""
        assert kind == "audio"
        assert self.ears is not None, "the run takes no sounds"
        return [self.ears(item["spectrogram"]) for item in items]


class Ears:
    """A spectrogram to rows of the decoder's size."""

    def __init__(self, context: ModelContext, outer: str) -> None:
        """outer: what names begin with."""
        context = whole(context)
        ears = cast("Mapping[str, Any]", context.config.raw["audio_config"])
        self.encoder = SoundEncoder(context, f"{outer}audio_tower", ears)
        self.norm = LayerNorm(context, f"{outer}audio_tower.layer_norm", self.encoder.size, EPS)
        name = f"{outer}multi_modal_projector.linear"
        self.projection = ReplicatedLinear(context, name, self.encoder.size, context.config.hidden_size, bias=True)

    def __call__(self, spectrogram: Tensor) -> Tensor:
        """[num_bins, 2 * n + 1] to [n / 2, hidden_size]."""
        return self.projection(self.norm(pairs(self.encoder(spectrogram))))
