"""Images, audio and video: bytes and a prompt in; the prompt with their tokens, and what the model encodes, out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from fwk.interfaces.declaration import Declaration

if TYPE_CHECKING:
    import numpy as np

    from fwk.interfaces.dialect import TextTools
    from fwk.types import ModelConfig


POSITION_PLANES = "position_planes"
"""Name of an array of ``PlacedMedia``, [3, length] int64, of models whose rotary positions have three planes (M-RoPE).

Of each of its tokens time, row and column, from 0 on; the prompt goes on behind the largest of them.
"""

POSITION_SHIFT = "position_shift"
"""Key of ``ForwardBatch.extras`` in steps of sequences with such media: [3, num_tokens] int64 on the device, what each
token's position in each plane is more than ``positions`` says. Decoding, drafts and chunks have it alike."""

MEDIA_SPAN = "media_span"
"""Key of ``ModelConfig.raw`` that ``ModelSpec.normalised`` sets where tokens of a piece of media see each other.

Of such a piece all tokens are computed in one step: so many at most.
"""


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One image, sound or video of a prompt, as it came. Nothing of it has been checked but its size.

    name: what errors call it: its place in the request.

    - ``kind``: "image", "audio" or "video"
    - ``data``: the file's bytes.
    """

    kind: str
    data: bytes
    name: str = "the item"


class Media(msgspec.Struct, frozen=True, array_like=True):
    """A piece of media that a model encodes at once. Its rows take the place of ``length`` tokens' embeddings.

    key: a hash (32 bytes) of the content, and of everything that the arrays made of it depend on. payload: a file on
    this machine (numpy's npz), there until the request has ended; its arrays for this piece are named ``INDEX.NAME``.

    - ``kind``: ``image``, ``audio`` or ``video``.
    - ``start``: the first of its tokens in the prompt
    - ``index``: of its arrays in the file.
    - ``is_span``: its tokens see each other (``MEDIA_SPAN``).
    """

    key: bytes
    kind: str
    start: int
    length: int
    payload: str
    index: int
    is_span: bool = False

    @property
    def end(self) -> int:
        """The place after its last token."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """What ``Model.encode`` takes at once: an item, or a part of one, such as a tile of an image.

    item: which of the items it is of. Its rows take the place of ``length`` tokens from ``start`` on, all of one
    id, or of more where the model makes the rows of all of them, so ``encode`` must make as many of ``arrays``, whose
    shapes are a matter between processor and model.
    """

    item: int
    start: int
    length: int
    arrays: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class PreparedItem:
    """What a processor makes of one item, whatever prompt it stands in: kept, so that it is decoded once.

    arrays: of each piece, of shapes as ``PlacedMedia`` has them. layout: what ``place`` needs besides, as plain data.

    - ``lengths``: tokens of each piece, in their order.
    """

    lengths: list[int]
    arrays: Sequence[Mapping[str, np.ndarray]]
    layout: Sequence[Any] = ()

    def piece(self, item: int, number: int, start: int) -> PlacedMedia:
        """One of them, at its place in a prompt."""
        return PlacedMedia(item, start, self.lengths[number], self.arrays[number])


@dataclass(frozen=True, slots=True)
class Placed:
    """A prompt in which media have their tokens. ``media`` are in the order of their tokens, and none overlap.

    - ``token_ids``: the prompt.
    """

    token_ids: list[int]
    media: list[PlacedMedia]


@dataclass(frozen=True, slots=True)
class MultimodalContext:
    """What a processor is built with.

    processor_config: the checkpoint's (``Checkpoint.processor_config``), with the fields of ``--mm-processor-kwargs``.
    max_pixels: width times height of the largest image that may be decoded.

    - ``config``: the served model's.
    - ``text``: its tokenizer and templates.
    - ``options``: the plugin's own options, validated; None where it declares none.
    """

    config: ModelConfig
    processor_config: Mapping[str, Any]
    text: TextTools
    max_pixels: int = 2**25
    options: Any = None


class MultimodalProcessor:
    """Places media in prompts. Built once in a process of its own, which forks for each request: never in the engine.

    What it makes of an item may depend on the item and on the context alone: K/V and rows are shared by content.
    It has ``prepare`` and ``place``, or, where nothing is to be kept from one request to the next, ``process`` alone.
    """

    def __init__(self, context: MultimodalContext) -> None:
        self.context = context

    def prepare(self, item: MediaItem) -> PreparedItem | None:
        """Decode an item, and make arrays of it. None, for all of them alike: ``process`` is called in each request.

        Raises ``InvalidRequest`` that names the item for damaged media, and such as are of another format or too large.
        """
        return None

    def place(self, token_ids: list[int], items: Sequence[MediaItem], prepared: Sequence[PreparedItem]) -> Placed:
        """Put in the tokens of the items, for whose places the chat template has left marks, in their order.

        ``token_ids`` stays as it is. Of an item that was prepared before, ``data`` and ``arrays`` are empty. Raises
        ``InvalidRequest`` for more or fewer items than marks.
        """
        raise NotImplementedError

    def process(self, token_ids: list[int], items: Sequence[MediaItem]) -> Placed:
        """Both in turn. Raises what they do."""
        prepared = [self.prepare(item) for item in items]
        return self.place(token_ids, items, [one for one in prepared if one is not None])


@dataclass(frozen=True, kw_only=True)
class MultimodalProcessorSpec(Declaration):
    """Declares a multimodal processor for some architectures.

    - ``architectures``: values of config.json's ``architectures`` it serves.
    - ``kinds``: of media: ``image``, ``audio``, ``video``.
    """

    family: ClassVar[str] = "multimodal"

    architectures: tuple[str, ...]
    kinds: frozenset[str] = frozenset()
