"""Limits of media in prompts, their places among the tokens, and files of what was made of them."""

from __future__ import annotations

import hashlib
import json
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fwk.errors import ConfigError, FwkError, InvalidRequest, NotServed, PluginError, PluginFault
from fwk.interfaces.declaration import Host
from fwk.interfaces.feature import JobPartContext, Plugins
from fwk.interfaces.multimodal import (
    MEDIA_SPAN,
    Media,
    MediaItem,
    MultimodalContext,
    MultimodalProcessor,
    MultimodalProcessorSpec,
    Placed,
    PlacedMedia,
    PreparedItem,
)
from fwk.types import ModelConfig
from fwk_multimodal.media import MediaOptions
from fwk_process.folders import TemporaryFolder

DEFAULT_LIMIT = 16
"""Media of a kind in a prompt."""


class ItemShape(msgspec.Struct, frozen=True, array_like=True):
    """A ``PreparedItem`` without its arrays."""

    lengths: list[int]
    layout: list[Any]


class JobItem(msgspec.Struct, frozen=True, array_like=True):
    """An item of a prompt: as it came, or, where it was decoded before, its shape.

    digest: of its content. path: of the file of its arrays. Of two that are the same the first alone has either.
    """

    kind: str
    name: str
    digest: bytes
    path: str
    data: bytes | None = None
    shape: ItemShape | None = None


class MediaJob(msgspec.Struct, frozen=True):
    """A prompt and its media; of none, they are decoded and no more.

    path: the file for what is made of all of them, by a processor that makes nothing of one alone.
    """

    token_ids: list[int] | None
    items: list[JobItem]
    path: str


class PlacedPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A prompt in which media have their tokens, and the media.

    shapes: of those that came as they are, by their digests; none of a processor that makes nothing of one alone.
    """

    token_ids: list[int]
    media: list[Media]
    shapes: dict[bytes, ItemShape]


class PayloadFile:
    """A file of what was made of a prompt's media. It is removed when nothing refers to this any more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        weakref.finalize(self, path.unlink, missing_ok=True)


class PayloadFolder:
    """Where a server keeps the payloads of requests that wait or run. Safe to use from any thread."""

    def __init__(self, max_bytes: int | None = None, num_kept: Callable[[], int] = lambda: 0) -> None:
        """num_kept: bytes of files that are kept for requests to come, which have a bound of their own."""
        self._max_bytes = max_bytes
        self._num_kept = num_kept
        self._folder: TemporaryFolder | None = None
        self._lock = threading.Lock()
        self._count = 0

    def new(self) -> PayloadFile:
        """Of a request. Raises ``NotServed`` while those of others take more than they may."""
        with self._lock:
            if self._folder is None:
                self._folder = TemporaryFolder("media")  # clients' images are private
            used = sum(path.stat().st_size for path in self._folder.path.iterdir() if path.exists())
            if self._max_bytes is not None and used - self._num_kept() > self._max_bytes:
                raise NotServed("the images of other requests take all the room there is (--mm-payload-bytes)", 503, 1)
            self._count += 1
            return PayloadFile(self._folder.path / f"{self._count}.npz")

    def close(self) -> None:
        with self._lock:
            if self._folder is not None:
                self._folder.close()


def processor_item(plugins: Plugins, config: ModelConfig, kinds: frozenset[str], name: str) -> Any:
    """The plugin that places media for a served model; None where it takes none.

    kinds: those that the model encodes. Raises ``PluginError`` where none can, naming what would do.
    """
    if not kinds:
        return None
    remedy = "or serve text alone with --enable-multimodal false"
    refusals: list[str] = []
    for item in plugins.items("multimodal"):
        spec = item.declaration
        if not isinstance(spec, MultimodalProcessorSpec) or config.architecture not in spec.architectures:
            continue
        refusal = spec.needs.refusal(Host())
        if refusal is None:
            return item
        refusals.append(f"{item.name} {refusal}")
    why = "; ".join(refusals) or f"no installed plugin knows {config.architecture}: install one"
    raise PluginError(
        f"{name} takes {' and '.join(sorted(kinds))}, for which no multimodal processor is there: {why}, {remedy}"
    )


def media_limits(options: MediaOptions, kinds: frozenset[str]) -> dict[str, int]:
    """How many of each kind a prompt may have. Raises ``ConfigError`` for ``--limit-mm-per-prompt`` that says less."""
    given = options.limit_mm_per_prompt
    limits: dict[str, Any] = {}
    try:
        if given.lstrip().startswith("{"):
            limits = json.loads(given)
        else:
            for part in given.replace(",", " ").split():
                kind, _, number = part.partition("=")
                limits[kind] = int(number)
    except ValueError:
        raise ConfigError(f"--limit-mm-per-prompt {given}: say image=4, or a JSON object") from None
    for kind, number in limits.items():
        if kind not in ("image", "audio", "video") or type(number) is not int or number < 0:
            raise ConfigError(f"--limit-mm-per-prompt {given}: {kind}={number} is no kind of media and its number")
    return {kind: limits.get(kind, DEFAULT_LIMIT) for kind in sorted(kinds)}


def check_media(items: Sequence[MediaItem], limits: Mapping[str, int]) -> None:
    """Raise ``InvalidRequest`` for media that the model or the server does not take."""
    for kind, count in Counter(item.kind for item in items).items():
        if kind not in limits:
            takes = f"text and {' and '.join(limits)}" if limits else "text only"
            raise InvalidRequest(f"this server's model reads {takes}, not {kind}", "messages")
        if count > limits[kind]:
            raise InvalidRequest(
                f"the prompt has {count} {kind}s; this server takes at most {limits[kind]} (--limit-mm-per-prompt)",
                "messages",
            )


class MediaPlacer:
    """Runs the multimodal processor of a model, and writes what it makes for the workers."""

    def __init__(self, context: JobPartContext) -> None:
        options: MediaOptions = context.options
        config = self._config = context.config
        self._has_spans = bool(config.raw.get(MEDIA_SPAN))
        item = processor_item(context.plugins, config, context.inputs, context.model_name)
        assert item is not None, "asked for media of models that take some"
        settings = {**context.checkpoint.processor_config(), **json.loads(options.mm_processor_kwargs)}
        self._label = item.label
        self._processor: MultimodalProcessor = context.plugins.build(
            item,
            MultimodalContext,
            config=config,
            processor_config=settings,
            text=context.text,
            max_pixels=options.max_image_pixels,
        )
        what = [item.name, item.version, config.architecture, settings]
        self._settings = hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).digest()

    def _called(self, method: str, *args: Any) -> Any:
        """What a method of the processor answers. Raises ``PluginFault``, and what it refuses with."""
        try:
            return getattr(self._processor, method)(*args)
        except (FwkError, MemoryError):
            raise
        except Exception as error:
            raise self._fault(f"raised {type(error).__name__}", method) from error

    def _fault(self, why: str, method: str) -> PluginFault:
        return PluginFault(f"multimodal processor {self._label} {why} in {method}")

    def run(self, job: MediaJob) -> PlacedPrompt:
        """Decode what was not before, and put all into the prompt. Raises ``InvalidRequest`` that names the item."""
        prepared: dict[bytes, PreparedItem] = {}
        new: dict[bytes, ItemShape] = {}
        for item in job.items:
            if item.shape is not None:
                lengths = item.shape.lengths
                prepared[item.digest] = PreparedItem(lengths, [{}] * len(lengths), item.shape.layout)
            elif item.data is not None:
                made = self._prepared(MediaItem(item.kind, item.data, item.name))
                if made is None:
                    return self._processed(job)
                self._write(Path(item.path), made.arrays)
                prepared[item.digest] = made
                new[item.digest] = ItemShape(made.lengths, list(made.layout))
        if job.token_ids is None:
            return PlacedPrompt([], [], new)
        return self._placed(job.token_ids, job.items, prepared, new)

    def _prepared(self, item: MediaItem) -> PreparedItem | None:
        made = self._called("prepare", item)
        if made is None:
            return None
        if not isinstance(made, PreparedItem):
            raise self._fault(f"answered a {type(made).__name__}, no PreparedItem,", "prepare")
        if len(made.arrays) != len(made.lengths) or _are_odd(made.arrays):
            raise self._fault("answered arrays that are none of numbers, or not of each piece", "prepare")
        return made

    def _placed(
        self,
        token_ids: list[int],
        given: Sequence[JobItem],
        prepared: Mapping[bytes, PreparedItem],
        new: dict[bytes, ItemShape],
    ) -> PlacedPrompt:
        items = [MediaItem(item.kind, b"", item.name) for item in given]
        made = [prepared[item.digest] for item in given]
        placed = self._called("place", token_ids, items, made)
        why = _misfit(self._config.vocab_size, placed, items)
        if why is not None:
            raise self._fault(why, "place")
        pieces: list[list[PlacedMedia]] = [[] for _ in given]
        media: list[Media] = []
        for piece in placed.media:
            own, item = pieces[piece.item], given[piece.item]
            media.append(self._media(item, piece, len(own), item.path, len(own)))
            own.append(piece)
        if [[piece.length for piece in own] for own in pieces] != [one.lengths for one in made]:
            raise self._fault("answered other pieces than were prepared", "place")
        return PlacedPrompt(placed.token_ids, media, new)

    def _processed(self, job: MediaJob) -> PlacedPrompt:
        """By a processor that makes everything anew in each request."""
        if job.token_ids is None:
            return PlacedPrompt([], [], {})
        data = {item.digest: item.data for item in job.items if item.data is not None}
        items = [MediaItem(item.kind, data[item.digest], item.name) for item in job.items]
        placed = self._called("process", job.token_ids, items)
        why = _misfit(self._config.vocab_size, placed, items)
        if why is not None:
            raise self._fault(why, "process")
        counts: Counter[int] = Counter()
        media: list[Media] = []
        for number, piece in enumerate(placed.media):
            media.append(self._media(job.items[piece.item], piece, counts[piece.item], job.path, number))
            counts[piece.item] += 1
        self._write(Path(job.path), [piece.arrays for piece in placed.media])
        return PlacedPrompt(placed.token_ids, media, {})

    def _media(self, item: JobItem, piece: PlacedMedia, part: int, path: str, index: int) -> Media:
        """part: which of the item's pieces it is. index: of its arrays in the file."""
        content = hashlib.sha256(self._settings + item.digest).digest()
        key = hashlib.sha256(content + part.to_bytes(4, "little")).digest()
        return Media(key, item.kind, piece.start, piece.length, path, index, is_span=self._has_spans)

    def _write(self, path: Path, pieces: Sequence[Mapping[str, np.ndarray]]) -> None:
        arrays = {f"{i}.{name}": x for i, piece in enumerate(pieces) for name, x in piece.items()}
        np.savez(path, allow_pickle=False, who=np.array(self._label), **arrays)


def _misfit(vocab_size: int, placed: Any, items: Sequence[MediaItem]) -> str | None:
    """Why rows would be inserted where they do not belong, or tokens looked up that there are not."""
    if not isinstance(placed, Placed):
        return f"answered a {type(placed).__name__}, no Placed,"
    wrong = next((token for token in placed.token_ids if not 0 <= index(token) < vocab_size), None)
    if wrong is not None:
        return f"answered the token {wrong}, outside 0 to {vocab_size - 1},"
    end = 0
    for piece in placed.media:
        if piece.length < 1 or piece.start < end or piece.start + piece.length > len(placed.token_ids):
            return "answered media that overlap, or end behind the prompt,"
        if not 0 <= piece.item < len(items):
            return f"answered a piece of item {piece.item}, of {len(items)},"
        if _are_odd([piece.arrays]):
            return "answered arrays that are none of numbers"
        end = piece.start + piece.length
    return None


def _are_odd(pieces: Sequence[Mapping[str, Any]]) -> bool:
    """Whether some are no arrays of numbers."""
    return any(not isinstance(x, np.ndarray) or x.dtype.hasobject for piece in pieces for x in piece.values())


def named(items: Sequence[MediaItem]) -> list[MediaItem]:
    """The same items with names by number, for callers whose items have no place in a request."""
    return [replace(item, name=f"{item.kind} {i + 1}") for i, item in enumerate(items)]


def media_of(messages: Sequence[Mapping[str, Any]]) -> list[MediaItem]:
    """Those of a conversation's parts: ``{"type": KIND, KIND: bytes}``."""
    parts = [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
    return [MediaItem(part["type"], part[part["type"]]) for part in parts if _is_media(part)]


def without_media(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation as templates read it: of media, only their kind."""
    return [
        {**message, "content": [{"type": part["type"]} if _is_media(part) else part for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _is_media(part: Mapping[str, Any]) -> bool:
    return isinstance(part.get(part.get("type", "")), bytes)
