"""What every processor of images, audio and video must do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest

from fwk.errors import InvalidRequest
from fwk.interfaces.multimodal import (
    MediaItem,
    MultimodalContext,
    MultimodalProcessor,
    MultimodalProcessorSpec,
    ProcessedMedia,
)
from fwk.plugins import Registered
from fwk.types import ModelConfig
from fwk_kit.testing.base import PluginSuite
from fwk_kit.testing.serving import TINY


class MultimodalProcessorSuite(PluginSuite):
    """The same media give the same prompt and key; damaged ones, or a wrong number of them, a refusal.

    samples: media, at least two that differ. prompt: token ids with one placeholder, for one item.
    config, processor_config: of the model.
    """

    family = "multimodal"
    interface = MultimodalProcessor
    samples: ClassVar[Sequence[MediaItem]] = ()
    prompt: ClassVar[Sequence[int]] = ()
    config: ClassVar[dict[str, Any]] = TINY
    processor_config: ClassVar[Mapping[str, Any]] = {}

    def processor(self, item: Registered) -> MultimodalProcessor:
        """One for the model."""
        config = ModelConfig.from_dict(self.config, "fwk_kit.testing")
        return self.make(item, MultimodalContext(config, self.processor_config, self.given(item)))

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
            assert isinstance(made, ProcessedMedia)
            assert prompt == list(self.prompt), "process() changed the prompt it was given"
            assert made.prompt_token_ids
            assert all(isinstance(token, int) and token >= 0 for token in made.prompt_token_ids)
            assert made.arrays

    def test_the_key_names_the_content(self, item: Registered) -> None:
        self.ready()
        keys = [self.processor(item).process(list(self.prompt), [media]).content_key for media in self.samples]
        again = [self.processor(item).process(list(self.prompt), [media]).content_key for media in self.samples]
        assert keys == again
        assert len(set(keys)) == len(keys), "different media have one key: K/V would be shared between them"

    def test_damaged_media_are_refused(self, item: Registered) -> None:
        self.ready()
        media = self.samples[0]
        for data in (b"", b"not that", media.data[: len(media.data) // 2], media.data[:-1]):
            with pytest.raises(InvalidRequest):
                self.processor(item).process(list(self.prompt), [MediaItem(media.kind, data)])

    def test_media_and_placeholders_must_agree(self, item: Registered) -> None:
        self.ready()
        for media in ([], [self.samples[0]] * 2):
            with pytest.raises(InvalidRequest):
                self.processor(item).process(list(self.prompt), media)
