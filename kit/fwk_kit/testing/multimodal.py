"""What every processor of images, audio and video must do."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import TextTools
from fwk.interfaces.multimodal import (
    MediaItem,
    MultimodalContext,
    MultimodalProcessor,
    MultimodalProcessorSpec,
    Placed,
    PreparedItem,
)
from fwk.plugins import Registered
from fwk_kit.testing.base import PluginSuite
from fwk_kit.testing.fake_frontend import ByteText
from fwk_kit.testing.serving import TINY, model_config


class MultimodalProcessorSuite(PluginSuite):
    """What an item becomes depends on it alone; damaged ones, or a wrong number of them, are refused.

    samples: media, at least two that differ. prompt: token ids with one mark, for one item.
    config, processor_config: of the model, as its files have them (``ModelSpec.normalised`` is applied).
    """

    family = "multimodal"
    interface = MultimodalProcessor
    samples: ClassVar[Sequence[MediaItem]] = ()
    prompt: ClassVar[Sequence[int]] = ()
    config: ClassVar[dict[str, Any]] = TINY
    processor_config: ClassVar[Mapping[str, Any]] = {}

    def processor(self, item: Registered) -> MultimodalProcessor:
        """One for the model."""
        config = model_config(self.config)
        return self.make(item, MultimodalContext(config, self.processor_config, self.text(), options=self.given(item)))

    def text(self) -> TextTools:
        """The tokenizer: a token for each byte."""
        return ByteText()

    def config_to_serve(self) -> Mapping[str, Any]:
        return self.config

    def ready(self) -> None:
        """Skip without samples."""
        if len(self.samples) < 2 or not self.prompt:
            pytest.skip("the suite has no media: set samples and prompt")

    def test_kinds_and_architectures_are_declared(self, item: Registered) -> None:
        assert isinstance(item.declaration, MultimodalProcessorSpec)
        assert item.declaration.architectures
        assert item.declaration.kinds <= {"image", "audio", "video"}
        assert item.declaration.kinds

    def test_media_become_tokens_and_arrays(self, item: Registered) -> None:
        self.ready()
        for media in self.samples:
            prompt = list(self.prompt)
            made = self.processor(item).process(prompt, [media])
            assert isinstance(made, Placed)
            assert prompt == list(self.prompt), "process() changed the prompt it was given"
            assert all(isinstance(token, int) and token >= 0 for token in made.token_ids)
            self.check(made, 1)

    def check(self, made: Placed, num_items: int) -> None:
        """What core relies on."""
        assert {piece.item for piece in made.media} == set(range(num_items)), "an item has no piece"
        end = 0
        outside = Counter(made.token_ids)
        for piece in made.media:
            assert piece.start >= end, "pieces overlap, or are not in the order of their tokens"
            assert piece.length > 0
            end = piece.start + piece.length
            outside -= Counter(made.token_ids[piece.start : end])
            assert piece.arrays
            assert all(isinstance(array, np.ndarray) for array in piece.arrays.values())
        assert end <= len(made.token_ids)
        lost = Counter([*self.prompt] * num_items) - outside
        assert lost.total() <= num_items, "rows take the place of the prompt's own tokens, not of the marks alone"

    def test_what_an_item_becomes_depends_on_it_alone(self, item: Registered) -> None:
        """K/V and encoded rows are shared by content."""
        self.ready()
        for media in self.samples:
            alone = self.processor(item).process(list(self.prompt), [media])
            for other in self.samples:
                both = self.processor(item).process([*self.prompt, *self.prompt], [other, media])
                self.check(both, 2)
                second = [piece for piece in both.media if piece.item == 1]
                assert [piece.length for piece in second] == [piece.length for piece in alone.media]
                for ours, theirs in zip(second, alone.media, strict=True):
                    assert ours.arrays.keys() == theirs.arrays.keys()
                    for name, array in ours.arrays.items():
                        np.testing.assert_array_equal(array, theirs.arrays[name])

    def test_what_was_prepared_before_is_placed_alike(self, item: Registered) -> None:
        """What is kept of an item are its lengths and its layout, which are sent to another process."""
        self.ready()
        for media in self.samples:
            made = self.processor(item).prepare(media)
            if made is None:
                pytest.skip("it makes nothing of an item alone")
            assert len(made.lengths) == len(made.arrays)
            kept = [PreparedItem(made.lengths, [{} for _ in made.arrays], json.loads(json.dumps(list(made.layout))))]
            wanted = self.processor(item).process(list(self.prompt), [media])
            found = self.processor(item).place(list(self.prompt), [replace(media, data=b"")], kept)
            assert found.token_ids == wanted.token_ids
            places = [[(piece.item, piece.start, piece.length) for piece in one.media] for one in (found, wanted)]
            assert places[0] == places[1]
            assert [piece.length for piece in wanted.media] == made.lengths

    def test_different_media_become_different_arrays(self, item: Registered) -> None:
        self.ready()
        first, second = (self.processor(item).process(list(self.prompt), [media]) for media in self.samples[:2])
        arrays = [
            [array.tobytes() for piece in made.media for array in piece.arrays.values()] for made in (first, second)
        ]
        assert arrays[0] != arrays[1]

    def test_damaged_media_are_refused(self, item: Registered) -> None:
        self.ready()
        media = self.samples[0]
        half, most = media.data[: len(media.data) // 2], media.data[: len(media.data) * 3 // 4]  # behind a short head
        for data in (b"", b"not that", half, most):
            with pytest.raises(InvalidRequest):
                self.processor(item).process(list(self.prompt), [MediaItem(media.kind, data, "it")])

    def test_media_and_placeholders_must_agree(self, item: Registered) -> None:
        self.ready()
        for media in ([], [self.samples[0]] * 2):
            with pytest.raises(InvalidRequest):
                self.processor(item).process(list(self.prompt), media)
