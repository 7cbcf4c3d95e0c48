"""Bodies that are read before a route has them, and given to it again: whom ``model`` there, or in the query, names."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.types import Message, Receive, Scope


class _Named(msgspec.Struct):
    """What is read of a body here; the dialect reads the rest."""

    model: Any = None


_decode = msgspec.json.Decoder(_Named).decode


def is_form(scope: Scope) -> bool:
    """A file that is sent is not read twice, and names no model."""
    return dict(scope["headers"]).get(b"content-type", b"").lower().startswith(b"multipart/")


def names_of(scope: Scope, messages: Sequence[Message]) -> list[Any]:
    """What the body calls the model, of any type, then what the query does; whichever of them does."""
    body = b"".join(message.get("body", b"") for message in messages)
    try:
        named = _decode(body).model if body else None
    except (msgspec.DecodeError, ValueError, RecursionError):
        named = None  # the dialect says what is wrong
    query = parse_qs(scope["query_string"].decode("latin-1")).get("model", [])[:1]
    return [name for name in (named, *query) if name not in (None, "")]


async def read_all(receive: Receive) -> list[Message]:
    """The messages of the whole body, or up to the client's leaving."""
    messages: list[Message] = []
    while True:
        messages.append(await receive())
        if messages[-1]["type"] != "http.request" or not messages[-1].get("more_body", False):
            return messages


def replay(messages: Sequence[Message], receive: Receive) -> Receive:
    """What gives the messages out again, then what ``receive`` does."""
    rest = deque(messages)

    async def replayed() -> Message:
        return rest.popleft() if rest else await receive()

    return replayed
