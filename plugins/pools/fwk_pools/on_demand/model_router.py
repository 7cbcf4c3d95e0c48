"""Hands each request to the application of the model it names."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from urllib.parse import parse_qs

import msgspec
from starlette.types import Message, Receive, Scope, Send

from fwk.interfaces.engine_pool import ModelApp


class _Named(msgspec.Struct):
    """What is read of a body here; the dialect reads the rest."""

    model: str | None = None


_decode = msgspec.json.Decoder(_Named).decode


class ModelRouter:
    """An ASGI application in front of those of several models.

    The model is named by ``model`` in a JSON body, else in the query string. A request that names none, or one that
    none is called, goes to the first model; if that knows nothing of what is asked for (404: a response of another
    model, say), and no name was given, to the others.
    """

    def __init__(self, models: Sequence[ModelApp]) -> None:
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._models[0].app(scope, receive, send)
            return
        messages = [] if scope["method"] in ("GET", "HEAD", "OPTIONS") or _is_form(scope) else await _read(receive)
        name = _name(scope, messages)
        if name is not None:
            model = next((model for model in self._models if model.is_called(name)), self._models[0])
            await model.app(scope, _replayed(messages, receive), send)
            return
        *others, last = self._models
        for model in others:
            if await self._is_answered(model, scope, _replayed(messages, receive), send):
                return
            if _is_form(scope):
                return
        await last.app(scope, _replayed(messages, receive), send)

    @staticmethod
    async def _is_answered(model: ModelApp, scope: Scope, receive: Receive, send: Send) -> bool:
        """Whether a model has an answer to send; a 404 is not sent."""
        is_unknown = False

        async def watched(message: Message) -> None:
            nonlocal is_unknown
            if message["type"] == "http.response.start" and message["status"] == 404:
                is_unknown = True
            if not is_unknown:
                await send(message)

        await model.app(dict(scope), receive, watched)
        return not is_unknown


def _is_form(scope: Scope) -> bool:
    """A file that is sent is not read twice, and names no model."""
    return dict(scope["headers"]).get(b"content-type", b"").lower().startswith(b"multipart/")


def _name(scope: Scope, messages: Sequence[Message]) -> str | None:
    body = b"".join(message.get("body", b"") for message in messages)
    try:
        named = _decode(body).model if body else None
    except (msgspec.DecodeError, ValueError, RecursionError):
        named = None  # the dialect says what is wrong
    return named or next(iter(parse_qs(scope["query_string"].decode("latin-1")).get("model", [])), None)


async def _read(receive: Receive) -> list[Message]:
    """The messages of the whole body, or up to the client's leaving."""
    messages: list[Message] = []
    while True:
        messages.append(await receive())
        if messages[-1]["type"] != "http.request" or not messages[-1].get("more_body", False):
            return messages


def _replayed(messages: Sequence[Message], receive: Receive) -> Receive:
    rest = deque(messages)

    async def replayed() -> Message:
        return rest.popleft() if rest else await receive()

    return replayed
