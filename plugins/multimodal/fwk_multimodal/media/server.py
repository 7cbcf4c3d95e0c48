"""The part in the server: reads and places the media of a prompt, and sends them along."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from fwk.config.secrets import read_secret
from fwk.errors import ConfigError, InvalidRequest, NotServed
from fwk.interfaces.dialect import EmbedInput, GenerateInput, MediaReading, PlacedInput
from fwk.interfaces.feature import JobPart, JobPartContext, RequestPart, ServerPart, ServerPartContext
from fwk.interfaces.multimodal import Media, MediaItem
from fwk_http.replies import CLIENT_CLOSED, unless_disconnected
from fwk_multimodal.media import MediaOptions, PromptMedia, encodes_apart
from fwk_multimodal.media.encoder_servers import (
    PATH,
    SIGNATURE,
    EncodedRows,
    EncodeOrder,
    identity_of,
    is_signed,
    media_of,
    sign,
)
from fwk_multimodal.media.encoders import EncoderPool, local_pool, remote_pool
from fwk_multimodal.media.placing import (
    JobItem,
    MediaJob,
    MediaPlacer,
    PayloadFolder,
    PlacedPrompt,
    check_media,
    media_limits,
    named,
    processor_item,
    without_media,
)
from fwk_multimodal.media.placing import (
    media_of as media_of_messages,
)
from fwk_multimodal.media.prepared import Prepared, PreparedItems, digest_of
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


class MediaJobs(JobPart):
    """Decodes media and places them, in a process that can be killed."""

    def __init__(self, context: JobPartContext) -> None:
        self._placer = MediaPlacer(context)

    def run(self, body: bytes) -> bytes:
        return msgspec.msgpack.encode(self._placer.run(msgspec.msgpack.decode(body, type=MediaJob)))


class MediaRequests(ServerPart, MediaReading):
    """Has a part in requests with media. Their payloads are there as long as the input refers to them."""

    public_paths = (PATH,)

    def __init__(self, context: ServerPartContext) -> None:
        """Raises ``PluginError`` where the model takes media, and nothing here can place them."""
        super().__init__(context)
        options: MediaOptions = context.options
        self._options = options
        frontend = context.frontend
        self._limits = media_limits(options, context.inputs)
        self._reader = MediaReader(options)
        self._prepared = PreparedItems(options.mm_processor_cache_bytes)
        max_bytes = None if frontend is None else options.mm_payload_bytes
        self._payloads = PayloadFolder(max_bytes, lambda: self._prepared.num_bytes)
        self._keeps = True  # until the processor makes nothing of an item alone
        self._encoders: EncoderPool | None = None
        self._secret, self._identity = b"", ""
        assert context.plugins is not None
        assert context.config is not None
        if processor_item(context.plugins, context.config, context.inputs, context.model_name) is None:
            if options.encoder_only:
                raise ConfigError(f"--encoder-only: {context.model_name} takes text alone, which needs no encoder")
            return
        if frontend is not None:
            frontend.card = replace(frontend.card, media=self._limits)
            context.jobs.warm_up()
        self._open_encoders()

    def _open_encoders(self) -> None:
        """Processes or servers that encode, where the options ask for some."""
        context, options = self.context, self._options
        if context.frontend is None or not (encodes_apart(options) or options.encoder_only):
            return
        assert context.encoder is not None
        assert context.config is not None
        if options.encoder_token_file is not None:
            weights = context.frontend.served_weights
            sizes = [] if weights is None else [state.size for state in weights.files.values()]
            self._identity = identity_of(context.config, sizes)
            self._secret = read_secret(options.encoder_token_file, "--encoder-token-file")
        if options.encoder_servers:
            self._encoders = remote_pool(options, self._secret, self._identity)
        else:
            recipe = partial(context.encoder, context.name)
            self._encoders = local_pool(recipe, context.name, options, options.mm_encoder_workers or 1)
        self.max_seconds = MAX_ENCODING_SECONDS
        context.lifecycle.background(self._encoders.run)

    def routes(self, app: FastAPI) -> None:
        if not self._options.encoder_only:
            return

        @app.post(PATH, include_in_schema=False)
        async def encode_media(request: Request) -> Response:
            body = await request.body()
            if not is_signed(self._secret, body, request.headers.get(SIGNATURE, ""), is_answer=False):
                raise NotServed(f"{PATH} is for servers with the same secret in --encoder-token-file", 401)
            try:
                order = msgspec.msgpack.decode(body, type=EncodeOrder)
            except (msgspec.DecodeError, ValueError):
                raise InvalidRequest(f"the body of {PATH} is not of this version's form") from None
            found = await unless_disconnected(request.receive, self._encoded(order))
            if found is None:
                return Response(status_code=CLIENT_CLOSED)
            answer = msgspec.msgpack.encode(found)
            headers = {SIGNATURE: sign(self._secret, answer, is_answer=True)}
            return Response(answer, media_type="application/msgpack", headers=headers)

    async def _encoded(self, order: EncodeOrder) -> EncodedRows:
        """What another server asks for."""
        if order.identity != self._identity:
            raise NotServed("this server encodes for another model, or for other weights", 409)
        assert self._encoders is not None
        if not order.lengths:
            trouble = self._encoders.trouble()
            if trouble:
                raise NotServed(trouble, 503, 1)
            return EncodedRows(order.nonce)
        payload, target = self._payloads.new(), self._payloads.new()
        try:
            await asyncio.to_thread(payload.path.write_bytes, order.payload)
            media = await asyncio.to_thread(media_of, order, payload.path)
        except ValueError as error:
            raise InvalidRequest(f"the order of another server: {error}") from None
        files = [file.path for file in await self._encoders.encode(media, payload)]
        await asyncio.to_thread(gather_rows, target.path, media, files)
        return EncodedRows(order.nonce, await asyncio.to_thread(target.path.read_bytes))

    def read(self, kind: str, url: str, name: str) -> MediaItem:
        return MediaItem(kind, self._reader.read(url, name), name)

    def place(self, token_ids: list[int], items: Sequence[MediaItem]) -> PlacedInput:
        check_media(items, self._limits)
        if sum(len(item.data) for item in items) > MAX_BYTES:
            raise InvalidRequest(f"the request's media have more than {MAX_BYTES >> 20} MiB together", "messages")
        digests = [digest_of(item) for item in items]
        if not self._keeps:
            return self._placed(token_ids, items, digests, {})
        known, own, others = self._prepared.claim(dict.fromkeys(digests))
        try:
            if not others:
                return self._placed(token_ids, items, digests, known, own)
            if own:
                mine = [(item, digest) for item, digest in zip(items, digests, strict=True) if digest in own]
                self._placed(None, [item for item, _ in mine], [digest for _, digest in mine], known, own)
        finally:  # those that wait decode by themselves what this request could not
            for digest, preparing in own.items():
                if not preparing.is_done.is_set():
                    self._prepared.publish(digest, None)
        with self.context.jobs.waiting():
            made = {digest: preparing.wait() for digest, preparing in (own | others).items()}
        known |= {digest: found for digest, found in made.items() if found is not None}
        return self._placed(token_ids, items, digests, known)

    def _placed(
        self,
        token_ids: list[int] | None,
        items: Sequence[MediaItem],
        digests: Sequence[bytes],
        known: dict[bytes, Prepared],
        own: Collection[bytes] = (),
    ) -> PlacedInput:
        """Have a job decode what is not ``known``, and put all into the prompt; None: decode it and no more.

        own: what others wait for. What becomes of it is published.
        """
        payload = self._payloads.new()
        files = {digest: known[digest].file if digest in known else self._payloads.new() for digest in digests}
        sent: list[JobItem] = []
        for item, digest in zip(items, digests, strict=True):
            shape = known[digest].shape if digest in known else None
            data = item.data if shape is None and all(one.digest != digest for one in sent) else None
            sent.append(JobItem(item.kind, item.name, digest, str(files[digest].path), data, shape))
        found = self.context.jobs.run(
            msgspec.msgpack.encode(MediaJob(token_ids, sent, str(payload.path))),
            "decoding the request's media",
            cpu_seconds=CPU_SECONDS,
            max_bytes=JOB_BYTES + BYTES_PER_PIXEL * self._options.max_image_pixels,
        )
        placed = msgspec.msgpack.decode(found, type=PlacedPrompt)
        self._keeps = self._keeps and len(placed.shapes) == len(files.keys() - known.keys())
        for digest in own:
            if digest in placed.shapes:
                file = files[digest]
                made = Prepared(placed.shapes[digest], file, file.path.stat().st_size)
                self._prepared.publish(digest, made)
        return PlacedInput(placed.token_ids, placed.media, (payload, *files.values()))

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], dict[str, Any]]:
        media = media_of_messages(messages)
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
        """The media of a checked input as the engine gets them, and what holds the files that they refer to."""
        media, payload = list(item.media), item.payload
        if self._encoders is None:
            return media, payload
        files = await self._encoders.encode(media, payload)
        target = self._payloads.new()
        paths = [file.path for file in files]
        return await asyncio.to_thread(gather_rows, target.path, media, paths), target

    async def engines_ready(self) -> None:
        if self._encoders is not None:
            await self._encoders.ready()

    def trouble(self) -> str | None:
        return None if self._encoders is None else self._encoders.trouble()

    def close(self) -> None:
        self._prepared.clear()
        self._payloads.close()


class MediaRequest(RequestPart):
    """One with media."""

    def __init__(self, server: MediaRequests) -> None:
        self._server = server

    async def enter(self, item: GenerateInput) -> PromptMedia | None:
        media, self._payload = await self._server.sent(item)  # files, removed when nothing refers to it any more
        return PromptMedia(media)
