"""Images, audio and video: bytes in, prompt tokens and tensors out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fwk.interfaces.declaration import Declaration

if TYPE_CHECKING:
    from fwk.types import ModelConfig


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One decoded-size-checked piece of media of a request."""

    kind: str  # "image", "audio" or "video"
    data: bytes


@dataclass(frozen=True, slots=True)
class ProcessedMedia:
    """A prompt with its media placed.

    ``content_key`` is a hash of the media: it becomes part of the request's cache namespace.
    """

    prompt_token_ids: list[int]
    arrays: Mapping[str, Any]  # numpy arrays for ForwardBatch.extras
    content_key: str


@dataclass(frozen=True, slots=True)
class MultimodalContext:
    """What a processor is built with."""

    config: ModelConfig
    processor_config: Mapping[str, Any]
    options: Any = None


class MultimodalProcessor(ABC):
    """Runs in the API process (or a child of it), never in the engine."""

    def __init__(self, context: MultimodalContext) -> None:
        self.context = context

    @abstractmethod
    def process(self, prompt_token_ids: list[int], items: Sequence[MediaItem]) -> ProcessedMedia:
        """Raises ``InvalidRequest`` for damaged media, or more or fewer items than placeholders."""


@dataclass(frozen=True, kw_only=True)
class MultimodalProcessorSpec(Declaration):
    """Declares a multimodal processor for some architectures."""

    family: ClassVar[str] = "multimodal"

    architectures: tuple[str, ...]
    kinds: frozenset[str] = frozenset()
