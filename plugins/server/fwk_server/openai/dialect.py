"""The routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from fwk import __version__
from fwk.interfaces.dialect import Dialect, DialectContext, Frontend
from fwk.interfaces.lifecycle import Stage
from fwk_server._common import body, completion
from fwk_server._common.batches import BatchRunner, model_of
from fwk_server._common.caller import Caller, caller_of
from fwk_server._common.chat import call as chat_call
from fwk_server._common.chat import constraints
from fwk_server._common.chat.models import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from fwk_server._common.chat.other_names import refuse_unknown, want_model, warn_unknown
from fwk_server._common.chat.served import anthropic_body
from fwk_server._common.documented import EVENTS, Reply, documented, json_body
from fwk_server._common.files import FileStore
from fwk_server._common.logprobs import TokenTexts
from fwk_server._common.once import Once
from fwk_server._common.records import Records
from fwk_server._common.replies import (
    SMALL_BODY,
    Endpoint,
    EventStream,
    closed_on_disconnect,
    json_response,
    off_loop,
    read_as,
    reply,
)
from fwk_server._common.upload import FORM_BYTES
from fwk_server.openai import OpenAIOptions, adapters, chat, completions, embeddings, stored, tokens
from fwk_server.openai.batch_routes import BatchBody, BatchRoutes
from fwk_server.openai.bodies import (
    AdaptersBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingsBody,
    ErrorBody,
    ModelBody,
    ModelsBody,
    RenderedBody,
    TokenizeBody,
    TokenizerInfoBody,
    VersionBody,
)
from fwk_server.openai.stored import StoredCompletions, metadata_of

if TYPE_CHECKING:
    from fastapi import FastAPI

Prepare = Callable[..., Any]
"""From a body's fields, the frontend and whoever calls, to what a route needs."""

_ANTHROPIC = "anthropic-version"
"""The header that Anthropic's clients send."""

"""Bodies up to this many bytes are parsed, rendered and tokenised on the event loop: a hand-over costs more."""

SLOW_WORDS = (b"chat_template_kwargs", b"_url", b"\\u", *constraints.WORDS)
"""Unless they hold one of these: a template may then do more, a grammar has to be compiled, or an image decoded."""


MODELS: dict[Prepare, type[BaseModel]] = {chat_call.read: ChatRequest, completion.read: CompletionRequest}
"""Whose fields ``--strict-requests`` wants to be all there are."""


_BATCHED: dict[str, Prepare] = {
    "/v1/chat/completions": chat_call.read,
    "/v1/completions": completion.read,
    "/v1/embeddings": embeddings.prepare,
}


_ELSEWHERE = {
    "/v1/moderations": "/v1/moderations is not served here: serve a classifier of what must not be said, and ask "
    "/classify (this server moderates nothing by itself)"
}


class OpenAIDialect(Dialect):
    """OpenAI's API over the served model."""

    requests = {
        "/v1/chat/completions": ChatRequest,
        "/v1/completions": CompletionRequest,
        "/v1/chat/completions/render": ChatRequest,
        "/v1/completions/render": CompletionRequest,
        "/v1/embeddings": EmbeddingRequest,
        "/tokenize": TokenizeRequest,
        "/detokenize": DetokenizeRequest,
        "/v1/load_lora_adapter": LoadAdapterRequest,
        "/load_lora_adapter": LoadAdapterRequest,
        "/v1/unload_lora_adapter": UnloadAdapterRequest,
        "/unload_lora_adapter": UnloadAdapterRequest,
        "/v1/batches": BatchBody,
        stored.ONE: stored.UpdateBody,
    }
    elsewhere = _ELSEWHERE
    request_notes = body.NOTES

    def __init__(self, context: DialectContext) -> None:
        super().__init__(context)
        self._frontend = context.frontend
        self._is_strict = bool(context.options and context.options.strict_requests)
        self._tokens = TokenTexts(context.frontend.text)
        self._peer_tokens: dict[str, TokenTexts] = {}  # of other models, once a batch has asked for one
        options = context.options or OpenAIOptions()
        self._records = Records(options.files_dir, "openai", self._frontend)
        self._stored = StoredCompletions(options.completions_store_bytes, self._records, self._frontend)
        self._once = Once()
        self._files = FileStore(self._records, options.max_files_bytes)
        self.max_bodies = {"/v1/files": options.max_files_bytes + FORM_BYTES}
        concurrency = options.batch_concurrency
        self._batches = BatchRunner(self._frontend, self._files, self._serve, self.error_body, concurrency)
        context.lifecycle.on(Stage.CLOSE, self._close)
        self._records.serve(context.lifecycle, self._load)

    def routes(self, app: FastAPI) -> None:
        self._post(app, "/v1/chat/completions", self.create_chat_completion, ChatBody)
        self._post(app, "/v1/completions", self.create_completion, CompletionBody)
        self._post(app, "/v1/embeddings", self.create_embedding, EmbeddingsBody)
        self._post(app, "/v1/chat/completions/render", self.render_chat, RenderedBody, can_stream=False)
        self._post(app, "/v1/completions/render", self.render_completion, list[RenderedBody], can_stream=False)
        self._post(app, "/tokenize", self.tokenize, TokenizeBody)
        self._post(app, "/detokenize", self.detokenize, DetokenizeBody)
        self._get(app, "/tokenizer_info", self.tokenizer_info, TokenizerInfoBody)
        self._get(app, "/version", self.version, VersionBody)
        self._get(app, "/v1/models", self.list_models, ModelsBody)
        self._get(app, "/v1/models/{name:path}", self.retrieve_model, ModelBody)

        BatchRoutes(self._frontend, self._files, self._batches).add(app)
        self._stored.add_routes(app)

    def _load(self) -> None:
        self._stored.load()
        self._batches.load()

    async def _close(self) -> None:
        await self._batches.close()
        self._records.close()

    async def _serve(self, endpoint: str, data: bytes, caller: Caller) -> dict[str, Any]:
        """The reply to a request of a batch, by the model of this server that it names."""
        frontend, tokens = self._served_by(await self._frontend.run_blocking(model_of, data))
        prepare = _BATCHED[endpoint]
        if prepare in MODELS:
            prepare = partial(self._known, prepare)
        call = await frontend.run_blocking(body.apply, prepare, data, frontend, caller)
        if endpoint == "/v1/embeddings":
            embeddings.check(call, frontend)
            return await embeddings.embed(call, frontend)
        kind = chat if endpoint == "/v1/chat/completions" else completions
        return await kind.complete(call, frontend, tokens)

    def _served_by(self, name: Any) -> tuple[Frontend, TokenTexts]:
        """The model of a name, or this one, which refuses a name that no model has."""
        if isinstance(name, str) and not self._frontend.is_called(name):
            for peer in self._frontend.peers:
                if peer.is_called(name):
                    return peer, self._peer_tokens.setdefault(peer.card.name, TokenTexts(peer.text))
        return self._frontend, self._tokens

    def admin_routes(self, app: FastAPI) -> None:
        for start in ("/v1", ""):
            self._post(app, f"{start}/load_lora_adapter", self.load_lora_adapter, AdaptersBody)
            self._post(app, f"{start}/unload_lora_adapter", self.unload_lora_adapter, AdaptersBody)

    def _get(self, app: FastAPI, path: str, endpoint: Callable[..., Any], reply: type[Reply]) -> None:
        responses = documented(reply, ErrorBody, works=False)
        app.add_api_route(path, endpoint, methods=["GET"], response_model=None, responses=responses)

    def _post(self, app: FastAPI, path: str, endpoint: Endpoint, reply_model: Any, *, can_stream: bool = True) -> None:
        can_stream = can_stream and "stream" in self.requests[path].model_fields
        app.add_api_route(
            path,
            closed_on_disconnect(endpoint),
            methods=["POST"],
            response_model=None,
            name=endpoint.__name__,
            description=endpoint.__doc__,
            responses=documented(reply_model, ErrorBody, stream=EVENTS if can_stream else ""),
            openapi_extra={"requestBody": json_body(self.requests[path])},
        )

    async def create_chat_completion(self, request: Request) -> Response:
        """Answer a conversation."""
        call = await self._read(request, chat_call.read)
        keep = None
        if call.body.store:
            tenant = caller_of(request).service.tenant
            keep = partial(self._stored.put, call, metadata_of(call), tenant=tenant)
        if call.body.stream:
            return EventStream(chat.events(call, self._frontend, self._tokens, keep), self.error_body)
        return await reply(request, chat.complete(call, self._frontend, self._tokens, keep))

    async def create_completion(self, request: Request) -> Response:
        """Continue one or more prompts."""
        call = await self._read(request, completion.read)
        if call.body.stream:
            return EventStream(completions.events(call, self._frontend, self._tokens), self.error_body)
        return await reply(request, completions.complete(call, self._frontend, self._tokens))

    async def create_embedding(self, request: Request) -> Response:
        """Turn one or more texts into vectors."""
        call = await self._read(request, embeddings.prepare)
        embeddings.check(call, self._frontend)
        return await reply(request, embeddings.embed(call, self._frontend))

    async def render_chat(self, request: Request) -> Response:
        """The prompt of a chat completion as token ids, and nothing computed: for routers that know what is cached."""
        return json_response(await self._read(request, tokens.render_chat))

    async def render_completion(self, request: Request) -> Response:
        """The prompts of a completion as token ids, and nothing computed."""
        return json_response(await self._read(request, tokens.render_completion))

    async def tokenize(self, request: Request) -> Response:
        """Turn a prompt or messages into token ids."""
        return json_response(await self._read(request, partial(tokens.tokenize, tokens=self._tokens)))

    async def detokenize(self, request: Request) -> Response:
        """Turn token ids into text."""
        return json_response(await self._read(request, tokens.detokenize))

    async def tokenizer_info(self) -> Response:
        """The names of special tokens, for evaluations that cut texts with /tokenize."""
        return json_response(await self._frontend.run_blocking(tokens.tokenizer_info, self._frontend))

    async def version(self) -> Response:
        """The version of fwk, as vLLM tells its own."""
        return json_response({"version": __version__})

    async def list_models(self, request: Request) -> Response:
        """List the served model and its LoRA adapters; for Anthropic's clients, which ask the same path, as theirs."""
        listed = adapters.list_models(self._frontend)
        if _ANTHROPIC in request.headers:
            models = [anthropic_body(model) for model in listed["data"]]
            ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]}
            return json_response({"data": models, "has_more": False, **ends})
        return json_response(listed)

    async def retrieve_model(self, request: Request, name: str) -> Response:
        """Describe the served model or a LoRA adapter; without a name, list them."""
        if not name:
            return await self.list_models(request)
        model = adapters.retrieve_model(name, self._frontend)
        return json_response(anthropic_body(model) if _ANTHROPIC in request.headers else model)

    async def load_lora_adapter(self, request: Request) -> Response:
        """Load a LoRA adapter from the folders of ``--lora-dirs``. For administrators."""
        asked, _ = await read_as(LoadAdapterRequest, request, self._frontend)
        return json_response(await adapters.load(asked, self._frontend))

    async def unload_lora_adapter(self, request: Request) -> Response:
        """Forget a LoRA adapter once the requests for it that are under way have ended. For administrators."""
        asked, _ = await read_as(UnloadAdapterRequest, request, self._frontend)
        return json_response(await adapters.unload(asked, self._frontend))

    async def _read(self, request: Request, prepare: Prepare) -> Any:
        """What ``prepare`` makes of the body: here when it is small, else off the event loop."""
        data, caller = await body.read(request), caller_of(request)
        if prepare in MODELS:
            prepare = partial(self._known, prepare)
        if len(data) <= SMALL_BODY and not any(word in data for word in SLOW_WORDS):
            return body.apply(prepare, data, self._frontend, caller)
        return await off_loop(request, self._frontend, body.apply, prepare, data, self._frontend, caller)

    def _known(self, prepare: Prepare, raw: Mapping[str, Any], frontend: Frontend, *args: Any) -> Any:
        """``prepare``, if all fields are known or need not be."""
        models = [MODELS[prepare], *frontend.processor_params]
        if self._is_strict:
            refuse_unknown(raw, models)
            want_model(raw)
        else:
            warn_unknown(raw, models, self._once)
        return prepare(raw, frontend, *args)
