"""The routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from fwk.errors import InvalidRequest
from fwk.types import SamplingParams
from fwk_server._common import body
from fwk_server._common.body import validate
from fwk_server._common.caller import Caller, caller_of
from fwk_server._common.chat.dialect import ChatDialect
from fwk_server._common.chat.media import MediaParts
from fwk_server._common.chat.messages import read_messages, template_kwargs
from fwk_server._common.chat.served import capabilities, named_by_model
from fwk_server._common.chat.tools import read_tools, with_tools
from fwk_server._common.documented import EVENTS, Reply
from fwk_server._common.replies import EventStream, json_response, off_loop, reply
from fwk_server.llamacpp.reply import complete, events, settings
from fwk_server.llamacpp.request import (
    CompletionBody,
    InfillBody,
    LlamaCall,
    TemplateBody,
    read_completion,
    read_infill,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import FastAPI

    from fwk.interfaces.dialect import Frontend

    Read = Callable[[Mapping[str, Any], Frontend, Caller], LlamaCall]

_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 503: "unavailable_error"}


class Completed(Reply):
    """What a prompt was continued with."""

    content: str
    stop: bool


class Prompt(Reply):
    """What the chat template makes of messages."""

    prompt: str


class Props(Reply):
    """What is served."""

    total_slots: int


class Failure(Reply):
    """Every error."""

    error: Any


class LlamaCppDialect(ChatDialect):
    """llama.cpp's API over the served model."""

    requests = {
        "/completion": CompletionBody,
        "/completions": CompletionBody,
        "/infill": InfillBody,
        "/apply-template": TemplateBody,
    }

    def routes(self, app: FastAPI) -> None:
        for path in ("/completion", "/completions"):
            self.route(app, path, self.complete, reply=Completed | list[Completed], error=Failure, stream=EVENTS)
        self.route(app, "/infill", self.infill, reply=Completed, error=Failure, stream=EVENTS)
        self.route(app, "/apply-template", self.apply_template, reply=Prompt, error=Failure)
        self.route(app, "/props", self.props, reply=Props, error=Failure, method="GET")

    def error_body(self, status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
        """llama.cpp's shape, and the field that was wrong."""
        kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
        return {"error": {"code": status, "message": message, "type": kind, "param": param}}

    async def complete(self, request: Request) -> Response:
        """Continue one or more prompts."""
        return await self._answer(request, read_completion)

    async def infill(self, request: Request) -> Response:
        """Write what stands between a prefix and a suffix."""
        return await self._answer(request, read_infill)

    async def apply_template(self, request: Request) -> Response:
        """The prompt that the chat template makes of messages."""
        data = await body.read(request)
        return json_response(await off_loop(request, self.frontend, self._rendered, data))

    async def props(self, request: Request) -> Response:
        """What is served, and how a request without settings is sampled."""
        frontend = self.frontend
        known = set(SamplingParams.__struct_fields__)
        given = {name: value for name, value in frontend.default_sampling.items() if name in known}
        return json_response(
            {
                "default_generation_settings": {
                    "n_ctx": frontend.card.max_model_len,
                    "params": settings(SamplingParams(**given), frontend),
                },
                "total_slots": 1,
                "model_path": frontend.card.name,
                "modalities": {word: word in capabilities(frontend) for word in ("vision", "audio")},
                "build_info": "fwk",
            }
        )

    async def _answer(self, request: Request, read: Read) -> Response:
        data, caller = await body.read(request), caller_of(request)
        asked = await off_loop(request, self.frontend, body.apply, read, data, self.frontend, caller)
        if asked.call.body.stream:
            return EventStream(events(asked, self.frontend), self.error_body, ending=b"")
        return await reply(request, complete(asked, self.frontend))

    def _rendered(self, data: bytes) -> dict[str, Any]:
        raw = body.parse(data)
        named_by_model(body.want(raw.get("model") or "", str, "a string", "model"), self.frontend)
        given = validate(TemplateBody, raw)
        if given.continue_final_message and given.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        messages = read_messages(given.messages, MediaParts(self.frontend))
        messages, tools = with_tools(messages, read_tools(raw, self.frontend), self.frontend)
        text = self.frontend.text.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=given.add_generation_prompt is not False and not given.continue_final_message,
            continue_final_message=bool(given.continue_final_message),
            kwargs=template_kwargs(given),
        )
        most = self.frontend.card.max_prompt_len
        self.frontend.text.check_fits(text, most, "messages")
        if len(self.frontend.text.encode(text, add_special_tokens=False)) > most:
            raise InvalidRequest(f"messages have more than {most} tokens", "messages")
        return {"prompt": text}
