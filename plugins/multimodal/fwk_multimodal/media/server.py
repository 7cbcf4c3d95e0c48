"""The part in the server: reads and places the media of a prompt, and sends them along."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import EmbedInput, GenerateInput, MediaReading, PlacedInput
from fwk.interfaces.feature import JobPart, JobPartContext, RequestPart, ServerPart, ServerPartContext
from fwk.interfaces.multimodal import Media, MediaItem
from fwk_multimodal.media import MediaOptions, PromptMedia, encodes_apart
from fwk_multimodal.media.encoders import EncoderPool
from fwk_multimodal.media.placing import (
    MediaPlacer,
    PayloadFolder,
    PlacedPrompt,
    check_media,
    media_limits,
    media_of,
    named,
    processor_item,
    without_media,
)
from fwk_multimodal.media.reader import MediaReader
from fwk_multimodal.media.rows import gather_rows

CPU_SECONDS = 30.0
"""What decoding the media of a prompt, and making arrays of them, may take."""

MAX_ENCODING_SECONDS = 600.0
"""What a request may wait for processes that encode."""

JOB_BYTES = 2**30
BYTES_PER_PIXEL = 16
MAX_BYTES = 2**27
"""What that may allocate: so many, and so many more for each pixel of the largest image that is decoded. And the
bytes of a request's media, which are sent there at once."""


class MediaJob(msgspec.Struct, frozen=True):
    """A prompt and its media, and the file for what is made of them."""

    token_ids: list[int]
    items: list[tuple[str, bytes, str]]  # kind, content, name
    path: str


class MediaJobs(JobPart):
    """Decodes media and places them, in a process that can be killed."""

    def __init__(self, context: JobPartContext) -> None:
        self._placer = MediaPlacer(context)

    def run(self, body: bytes) -> bytes:
        work = msgspec.msgpack.decode(body, type=MediaJob)
        items = [MediaItem(kind, data, name) for kind, data, name in work.items]
        return msgspec.msgpack.encode(self._placer.place(work.token_ids, items, Path(work.path)))


class MediaRequests(ServerPart, MediaReading):
    """Has a part in requests with media. Their payloads are there as long as the input refers to them."""

    def __init__(self, context: ServerPartContext) -> None:
        """Raises ``PluginError`` where the model takes media, and nothing here can place them."""
        super().__init__(context)
        options: MediaOptions = context.options
        self._options = options
        frontend = context.frontend
        self._limits = media_limits(options, context.inputs)
        self._reader = MediaReader(options)
        self._payloads = PayloadFolder(None if frontend is None else options.mm_payload_bytes)
        self._encoders: EncoderPool | None = None
        assert context.plugins is not None
        assert context.config is not None
        if processor_item(context.plugins, context.config, context.inputs, context.model_name) is None:
            return
        if frontend is not None:
            frontend.card = replace(frontend.card, media=self._limits)
            context.jobs.warm_up()
        if encodes_apart(options) and context.encoder is not None:
            self._encoders = EncoderPool(partial(context.encoder, context.name), context.name, options)
            self.max_seconds = MAX_ENCODING_SECONDS
            context.lifecycle.background(self._encoders.run)

    def read(self, kind: str, url: str, name: str) -> MediaItem:
        return MediaItem(kind, self._reader.read(url, name), name)

    def place(self, token_ids: list[int], items: Sequence[MediaItem]) -> PlacedInput:
        check_media(items, self._limits)
        if sum(len(item.data) for item in items) > MAX_BYTES:
            raise InvalidRequest(f"the request's media have more than {MAX_BYTES >> 20} MiB together", "messages")
        payload = self._payloads.new()
        job = MediaJob(token_ids, [(item.kind, item.data, item.name) for item in items], str(payload.path))
        found = self.context.jobs.run(
            msgspec.msgpack.encode(job),
            "decoding the request's media",
            cpu_seconds=CPU_SECONDS,
            max_bytes=JOB_BYTES + BYTES_PER_PIXEL * self._options.max_image_pixels,
        )
        placed = msgspec.msgpack.decode(found, type=PlacedPrompt)
        return PlacedInput(placed.token_ids, placed.media, payload)

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], dict[str, Any]]:
        media = media_of(messages)
        return without_media(messages), {"media": media} if media else {}

    def complete(self, item: GenerateInput) -> GenerateInput:
        given: Sequence[Any] = item.media
        if not given or not isinstance(given[0], MediaItem):
            return item
        placed = self.place(item.prompt_token_ids, named(given))
        return replace(item, prompt_token_ids=placed.token_ids, media=placed.media, payload=placed.payload)

    def open(self, item: GenerateInput | EmbedInput, caller: str) -> RequestPart | None:
        return MediaRequest(self) if isinstance(item, GenerateInput) and item.media else None

    async def sent(self, item: GenerateInput) -> tuple[list[Media], Any]:
        """The media of a checked input as the engine gets them, and the file that they refer to."""
        media, payload = list(item.media), item.payload
        if self._encoders is None:
            return media, payload
        files = await self._encoders.encode(media, payload)
        target = self._payloads.new()
        paths = [file.path for file in files]
        return await asyncio.to_thread(gather_rows, target.path, media, payload.path, paths), target

    async def engines_ready(self) -> None:
        if self._encoders is not None:
            await self._encoders.ready()

    def trouble(self) -> str | None:
        return None if self._encoders is None else self._encoders.trouble()

    def close(self) -> None:
        self._payloads.close()


class MediaRequest(RequestPart):
    """One with media."""

    def __init__(self, server: MediaRequests) -> None:
        self._server = server

    async def enter(self, item: GenerateInput) -> PromptMedia | None:
        media, self._payload = await self._server.sent(item)  # a file, removed when nothing refers to it any more
        return PromptMedia(media)
