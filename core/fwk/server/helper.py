"""The server's helper process, from its side: what may turn out endless or huge is tried there first."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec

from fwk.config import Config
from fwk.config.wire import to_plain
from fwk.errors import InvalidRequest, NotServed, RequestFailed
from fwk.interfaces.dialect import PlacedInput
from fwk.interfaces.multimodal import MediaItem
from fwk.text.media import PayloadFolder, PlacedPrompt
from fwk.types import GrammarRequest
from fwk_jobs.client import JobError, JobProcess

MAX_GRAMMAR_BYTES = 48 * 2**20
"""What compiling a grammar may allocate, as the engine keeps it."""


MEDIA_CPU_SECONDS = 30.0
"""What decoding the media of a prompt, and making arrays of them, may take."""

MEDIA_BYTES = 2**30
BYTES_PER_PIXEL = 16
MAX_MEDIA_BYTES = 2**27
"""What that may allocate: so many, and so many more for each pixel of the largest image that is decoded. And the
bytes of a request's media, which are sent there at once."""


class MediaJob(msgspec.Struct, frozen=True):
    """A prompt and its media, and the file for what is made of them; without media, the processor is built."""

    token_ids: list[int]
    items: list[tuple[str, bytes, str]]  # kind, content, name
    path: str


class GrammarJob(msgspec.Struct, frozen=True):
    """A grammar and the backend that is to compile it; without a grammar the backend is built, for those to come."""

    backend: str
    request: GrammarRequest | None


class HelperSetup(msgspec.Struct, frozen=True):
    """What the server settled on."""

    config: dict[str, Any]


def new_helper(config: Config) -> JobProcess:
    """Not started yet."""
    return JobProcess("fwk.server.helper_process", HelperSetup(to_plain(config)))


def warm_up(helper: JobProcess, backend: str) -> None:
    """Start the helper and have it build the backend, without waiting for it. Does nothing once it is closed."""
    with contextlib.suppress(JobError):
        helper.warm_up("grammar", msgspec.msgpack.encode(GrammarJob(backend, None)))


def warm_up_media(helper: JobProcess) -> None:
    """Start the helper and have it build the multimodal processor, without waiting for it."""
    with contextlib.suppress(JobError):
        helper.warm_up("media", msgspec.msgpack.encode(MediaJob([], [], "")))


def place_media(
    helper: JobProcess, folder: PayloadFolder, max_pixels: int, token_ids: list[int], items: Sequence[MediaItem]
) -> PlacedInput:
    """Have the helper decode media and place them in a prompt. Raises ``InvalidRequest`` where it refuses them."""
    if sum(len(item.data) for item in items) > MAX_MEDIA_BYTES:
        raise InvalidRequest(f"the request's media have more than {MAX_MEDIA_BYTES >> 20} MiB together", "messages")
    payload = folder.new()
    job = MediaJob(token_ids, [(item.kind, item.data, item.name) for item in items], str(payload.path))
    most = MEDIA_BYTES + BYTES_PER_PIXEL * max_pixels
    try:
        found = helper.call("media", msgspec.msgpack.encode(job), cpu_seconds=MEDIA_CPU_SECONDS, max_bytes=most)
    except JobError as error:
        raise _told(error, "decoding the request's media", MEDIA_CPU_SECONDS, most) from None
    placed = msgspec.msgpack.decode(found, type=PlacedPrompt)
    return PlacedInput(placed.token_ids, placed.media, payload)


def vet_grammar(helper: JobProcess, cpu_seconds: float, backend: str, request: GrammarRequest) -> None:
    """Have the helper compile a grammar. Raises ``InvalidRequest`` if it cannot, or not within the limits."""
    body = msgspec.msgpack.encode(GrammarJob(backend, request))
    try:
        helper.call("grammar", body, cpu_seconds=cpu_seconds, max_bytes=MAX_GRAMMAR_BYTES, max_waiting=None)
    except JobError as error:
        raise _told(error, "compiling the grammar", cpu_seconds, MAX_GRAMMAR_BYTES) from None


def _told(error: JobError, what: str, cpu_seconds: float, max_bytes: int) -> Exception:
    """An error as the client is told: ``what`` was done with its part of the request."""
    match error.status:
        case "refused":
            return InvalidRequest(str(error), error.param)
        case "cpu":
            return InvalidRequest(f"{what} takes more than {cpu_seconds:g} seconds of CPU time")
        case "memory":
            return InvalidRequest(f"{what} takes more than {max_bytes >> 20} MB of memory")
        case "busy":
            return NotServed(f"too many requests wait for {what}", 503, 1)
        case "closed":
            return NotServed("the server is stopping", 503)
    return RequestFailed(f"{what} failed")
