"""The routes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from fastapi import Query
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fwk import __version__
from fwk.errors import EngineDead, InvalidRequest, NotServed, RequestFailed
from fwk.interfaces.dialect import Dialect, DialectContext, Frontend
from fwk.interfaces.lifecycle import Stage
from fwk.types.sampling import MAX_N, MAX_STOP_STRINGS
from fwk_http.replies import ByteStream
from fwk_server._common import body
from fwk_server._common.caller import caller_of
from fwk_server._common.documented import BYTES, EVENTS, Reply, Responses, documented, json_body
from fwk_server._common.replies import (
    CLIENT_CLOSED,
    SMALL_BODY,
    EventStream,
    closed_on_disconnect,
    event,
    json_response,
    off_loop,
    read_as,
    reply,
    unless_disconnected,
)
from fwk_server.tgi import lightllm, remote_weights, sglang, weights
from fwk_server.tgi.elsewhere import ROUTES
from fwk_server.tgi.reply import complete, events
from fwk_server.tgi.request import Call, GenerateRequest, NotJSON, checked, prepare

if TYPE_CHECKING:
    from fastapi import FastAPI

"""Bodies up to this many bytes are read and tokenised on the event loop: a hand-over costs more."""

_KINDS = {
    400: "validation",
    422: "validation",
    424: "generation",
    429: "overloaded",
    503: "unavailable",
    504: "overloaded",
}


class Generated(Reply):
    """What a text was continued with."""

    generated_text: str


class Info(Reply):
    """What is served, and its bounds."""

    model_id: str
    max_total_tokens: int


class NativeInfo(Reply):
    """What is served, in SGLang's words."""

    model_path: str
    is_generation: bool


class ModelName(Reply):
    """What the model is called, in LightLLM's words."""

    model_name: str


class UpdateBody(Reply):
    """What became of an update of the weights, in SGLang's words."""

    success: bool
    message: str
    num_paused_requests: int


class WeightIndex(Reply):
    """The tensors of the weights, each with its type and shape."""

    version: int
    identity: str
    config: dict[str, Any]
    tensors: dict[str, Any]


class Failure(Reply):
    """Every error."""

    error: str
    error_type: str


class EitherFailure(Reply):
    """An error of TGI's, or of SGLang's, which is an object."""

    error: Any


PIPELINES = {"generate": "text-generation", "transcribe": "automatic-speech-recognition"}
"""Of tasks, in the hub's words."""


class TGIDialect(Dialect):
    """TGI's API over the served model."""

    requests: ClassVar[Mapping[str, type[BaseModel]]] = {
        **dict.fromkeys(("/generate", "/generate_stream", "/"), GenerateRequest),
        "/update_weights_from_disk": weights.UpdateRequest,
    }
    invalid_status = 422
    elsewhere = ROUTES
    request_notes = body.NOTES

    def __init__(self, context: DialectContext) -> None:
        super().__init__(context)
        self._frontend = context.frontend
        self._is_incremental = context.options is not None and context.options.stream_output
        self._weight_version = "default" if context.options is None else context.options.weight_version
        self._is_lightllm = context.options is not None and context.options.generate_api == "lightllm"
        self._remote_weights = remote_weights.RemoteWeights(context.frontend)
        context.lifecycle.on(Stage.CLOSE, self._remote_weights.close)

    def routes(self, app: FastAPI) -> None:
        self._post(app, "/generate", self.generate, documented(Any, EitherFailure, stream=EVENTS, more=(422, 424)))
        self._post(app, "/generate_stream", self.generate_stream, documented(None, Failure, stream=EVENTS, more=(422,)))
        both = documented(list[Generated], Failure, stream=EVENTS, more=(422, 424))
        self._post(app, "/", self.compat_generate, both)
        told = documented(Info, Failure, works=False)
        app.add_api_route("/info", self.info, methods=["GET"], response_model=None, responses=told)
        asked = documented(NativeInfo, Failure, works=False)
        for path in ("/get_model_info", "/model_info"):
            app.add_api_route(path, self.model_info, methods=["GET"], response_model=None, responses=asked)
        named = documented(ModelName, Failure, works=False)
        app.add_api_route("/get_model_name", self.model_name, methods=["GET"], response_model=None, responses=named)

    def admin_routes(self, app: FastAPI) -> None:
        app.add_api_route(
            "/update_weights_from_disk",
            self.update_weights,
            methods=["POST"],
            response_model=None,
            responses=documented(UpdateBody, UpdateBody),
            openapi_extra={"requestBody": json_body(weights.UpdateRequest)},
        )
        told = documented(WeightIndex, Failure, works=False, more=(409,))
        app.add_api_route(remote_weights.PATH, self.weight_index, methods=["GET"], response_model=None, responses=told)
        app.add_api_route(
            f"{remote_weights.PATH}/tensor",
            self.weight_bytes,
            methods=["GET"],
            response_model=None,
            response_class=Response,
            responses=documented(None, Failure, works=False, stream=BYTES, more=(409,)),
        )

    def error_body(self, status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
        """TGI's shape. A key that is missing or a body that is too large it does not know; they are validation too."""
        return {"error": message, "error_type": _KINDS.get(status, "validation" if status < 500 else "generation")}

    def _post(
        self, app: FastAPI, path: str, endpoint: Callable[[Request], Awaitable[Response]], responses: Responses
    ) -> None:
        async def route(request: Request) -> Response:
            try:
                return await endpoint(request)
            except NotJSON:
                raise  # 400, as core answers
            except InvalidRequest as error:
                message = f"Input validation error: {error}"
                return json_response(self.error_body(self.invalid_status, message, None, None), self.invalid_status)
            except RequestFailed as error:
                message = f"Request failed during generation: {error}"
                return json_response(self.error_body(424, message, None, None), 424)

        others = [sglang.NativeRequest] if path == "/generate" else []
        app.add_api_route(
            path,
            closed_on_disconnect(route),
            methods=["POST"],
            response_model=None,
            name=f"tgi_{getattr(endpoint, '__name__', path)}",
            description=endpoint.__doc__,
            responses=responses,
            response_class=JSONResponse if "model" in responses[200] else Response,  # of no kind of its own
            openapi_extra={"requestBody": json_body(self.requests[path], *others)},
        )

    async def generate(self, request: Request) -> Response:
        """Continue a text: in TGI's words, or SGLang's."""
        data = await body.read(request)
        if b'"inputs"' not in data or b'"input_ids"' in data or b'"text"' in data:
            native = await off_loop(request, self._frontend, _native, data, self._frontend, request)
            if native is not None:
                return await self._native(request, native)
        if self._is_lightllm:
            asked = await self._light(request)
            return await reply(request, lightllm.complete(asked, self._frontend))
        return await self._reply(request, await self._read(request, stream=False))

    async def _light(self, request: Request) -> lightllm.LightCall:
        data, caller = await body.read(request), caller_of(request)
        return await off_loop(request, self._frontend, body.apply, lightllm.read, data, self._frontend, caller)

    async def _native(self, request: Request, call: sglang.NativeCall | InvalidRequest) -> Response:
        """The reply to SGLang's clients, errors in their shape."""
        if isinstance(call, InvalidRequest):
            return json_response(_native_error(400, str(call), call.param, None), 400)
        call.weight_version = self._weight_version
        if call.body.stream:
            return EventStream(sglang.events(call, self._frontend, self._is_incremental), _native_error)
        try:
            found = await unless_disconnected(request.receive, sglang.complete(call, self._frontend))
        except RequestFailed as error:
            return json_response(_native_error(500, str(error), None, None), 500)
        return Response(status_code=CLIENT_CLOSED) if found is None else json_response(found)

    async def generate_stream(self, request: Request) -> Response:
        """Continue a text, an event for each token."""
        if self._is_lightllm:
            asked = await self._light(request)
            return EventStream(lightllm.events(asked, self._frontend), self.error_body, ending=b"")
        return self._stream(await self._read(request, stream=True))

    async def compat_generate(self, request: Request) -> Response:
        """Either of the two, as ``stream`` says; a reply in one piece is the only element of an array."""
        call = await self._read(request, stream=None)
        return self._stream(call) if call.is_stream else await self._reply(request, call, as_list=True)

    async def info(self) -> Response:
        """What is served, and its bounds."""
        card = self._frontend.card
        return json_response(
            {
                "model_id": card.name,
                "model_sha": None,
                "model_pipeline_tag": PIPELINES.get(card.task, "feature-extraction"),
                "max_best_of": MAX_N,
                "max_stop_sequences": MAX_STOP_STRINGS,
                "max_input_tokens": card.max_model_len - 1,
                "max_total_tokens": card.max_model_len,
                "max_client_batch_size": 1,
                "router": "fwk",
                "version": __version__,
                "sha": None,
                "docker_label": None,
            }
        )

    async def model_info(self) -> Response:
        """What is served, in SGLang's words; paths of the server are told to nobody."""
        card = self._frontend.card
        return json_response(
            {
                "model_path": card.name,
                "tokenizer_path": card.name,
                "is_generation": card.task == "generate",
                "weight_version": self._weight_version,
            }
        )

    async def model_name(self) -> Response:
        """What the model is called, in LightLLM's words."""
        return json_response({"model_name": self._frontend.card.name})

    async def update_weights(self, request: Request) -> Response:
        """Serve the weights of another checkpoint, as SGLang does. For administrators."""
        try:
            asked = weights.checked((await read_as(weights.UpdateRequest, request, self._frontend))[0])
            num_waited = await self._frontend.update_weights(
                asked.model_path, asked.load_format, aborts=asked.abort_all_requests
            )
        except InvalidRequest as error:
            return json_response({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        message = "Succeeded to update model weights."
        if asked.weight_version is not None:
            self._weight_version = asked.weight_version
            message += f" Weight version updated to {asked.weight_version}."
        return json_response({"success": True, "message": message, "num_paused_requests": num_waited})

    async def weight_index(self) -> Response:
        """What weights this server has, for another that starts from them. For administrators."""
        return Response(await self._remote_weights.index(), media_type="application/json")

    async def weight_bytes(
        self,
        request: Request,
        identity: Annotated[str, Query(max_length=64)],
        name: Annotated[str, Query(max_length=1024)],
    ) -> Response:
        """The bytes of a tensor, in blocks with digests. For administrators."""
        blocks = await self._remote_weights.stream(identity, name)
        if request.method == "HEAD":
            await blocks.aclose()
            return Response(media_type=BYTES)
        return ByteStream(blocks, remote_weights.last_words, media_type=BYTES)

    async def _read(self, request: Request, stream: bool | None) -> Call:
        data, caller = await body.read(request), caller_of(request)
        if len(data) <= SMALL_BODY:
            call = prepare(data, self._frontend, stream, caller)
        else:
            call = await off_loop(request, self._frontend, prepare, data, self._frontend, stream, caller)
        if call.item.sampling.grammar is None:
            call.item = checked(self._frontend, call.item)
        else:  # it is compiled
            call.item = await off_loop(request, self._frontend, checked, self._frontend, call.item)
        return call

    async def _reply(self, request: Request, call: Call, as_list: bool = False) -> Response:
        found = await unless_disconnected(request.receive, complete(call, self._frontend))
        if found is None:
            return Response(status_code=CLIENT_CLOSED)
        return json_response([found] if as_list else found)

    def _stream(self, call: Call) -> Response:
        return EventStream(self._events(call), self.error_body, ending=b"")

    async def _events(self, call: Call) -> AsyncGenerator[bytes, None]:
        """The events; a failure is one, also the first, as clients of TGI expect of a stream."""
        source = events(call, self._frontend)
        try:
            async for frames in source:
                yield frames
        except RequestFailed as error:
            yield event(self.error_body(424, f"Request failed during generation: {error}", None, None))
        except EngineDead as error:
            yield event(self.error_body(503, str(error), None, None))
        except NotServed as error:
            yield event(self.error_body(error.status, str(error), None, None))
        finally:
            await source.aclose()


def _native(data: bytes, frontend: Frontend, request: Request) -> sglang.NativeCall | InvalidRequest | None:
    """What SGLang's client asks for, or what is wrong with it; None for a body that is TGI's."""
    try:
        raw = body.parse(data)
    except InvalidRequest:
        return None
    if not sglang.is_native(raw):
        return None
    try:
        return sglang.read(raw, frontend, caller_of(request))
    except InvalidRequest as error:
        return error


def _native_error(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    """SGLang's shape of an error."""
    return {"error": {"message": message, "code": status, "param": param}}
