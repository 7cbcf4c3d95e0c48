"""Hands each request to the application of the model it names."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from fwk.interfaces.dialect import openai_error
from fwk.interfaces.engine_pool import ModelApp
from fwk_http.bodies import is_form, names_of, read_all, replay


class ModelRouter:
    """An ASGI application in front of those of several models.

    The model is named by ``model`` in a JSON body, else in the query string. A request whose body names a model that is
    not served goes to the first one, whose dialect refuses it; one whose query does is refused here. A request that
    names none goes to the first model; if that knows nothing of what is asked for (404: a response of another model,
    say), to the others; if none does, the first one's answer is sent.
    """

    def __init__(self, models: Sequence[ModelApp]) -> None:
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._models[0].app(scope, receive, send)
            return
        for name in names_of(scope, ()):
            if self._called(name) is None:
                told = openai_error(404, f"the model {name[:200]!r} is not served here", "model", "model_not_found")
                await JSONResponse(told, 404)(scope, receive, send)
                return
        messages = [] if scope["method"] in ("GET", "HEAD", "OPTIONS") or is_form(scope) else await read_all(receive)
        name = next((name for name in names_of(scope, messages) if isinstance(name, str)), None)
        if name is not None or is_form(scope):
            model = (self._called(name) if name else None) or self._models[0]
            await model.app(scope, replay(messages, receive), send)
            return
        first: list[Message] = []
        for model in self._models:
            unknown = await self._unknown(model, scope, replay(messages, receive), send)
            if not unknown:
                return
            first = first or unknown
        for message in first:
            await send(message)

    def _called(self, name: str) -> ModelApp | None:
        return next((model for model in self._models if model.is_called(name)), None)

    @staticmethod
    async def _unknown(model: ModelApp, scope: Scope, receive: Receive, send: Send) -> list[Message]:
        """The 404 that a model has for an answer, unsent; any other answer is sent."""
        unknown: list[Message] = []

        async def watched(message: Message) -> None:
            if unknown or (message["type"] == "http.response.start" and message["status"] == 404):
                unknown.append(message)
            else:
                await send(message)

        await model.app(dict(scope), receive, watched)
        return unknown
