"""Hands each request to the application of the model it names."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import Message, Receive, Scope, Send

from fwk.interfaces.engine_pool import ModelApp
from fwk.interfaces.model_names import is_form, names_of, read_all, replay


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
        messages = [] if scope["method"] in ("GET", "HEAD", "OPTIONS") or is_form(scope) else await read_all(receive)
        name = next((name for name in names_of(scope, messages) if isinstance(name, str)), None)
        if name is not None:
            model = next((model for model in self._models if model.is_called(name)), self._models[0])
            await model.app(scope, replay(messages, receive), send)
            return
        *others, last = self._models
        for model in others:
            if await self._is_answered(model, scope, replay(messages, receive), send):
                return
            if is_form(scope):
                return
        await last.app(scope, replay(messages, receive), send)

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
