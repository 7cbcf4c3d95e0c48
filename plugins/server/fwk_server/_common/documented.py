"""What /openapi.json says of replies: the errors every route has, and streams."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict

Responses = dict[int | str, dict[str, Any]]

_MEANINGS = {
    400: "The request cannot be served as it is.",
    401: "A valid API key is required.",
    404: "No such model.",
    408: "The request was not sent in time.",
    409: "What is asked for is not, or no longer, what the server has.",
    413: "The body is too large.",
    415: "The body is of a kind, or encoded in a way, that is not read.",
    417: "The only Expect served is 100-continue.",
    421: "The server does not answer to the name in the Host header.",
    422: "The request cannot be served as it is.",
    424: "The generation failed.",
    429: "Too many requests: try again after Retry-After seconds.",
    431: "The headers are too large.",
    500: "The server failed.",
    501: "The method or the Transfer-Encoding is not served.",
    503: "Nothing can be served now: try again after Retry-After seconds.",
    504: "The request took too long.",
}
EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
BYTES = "application/octet-stream"
HTML = "text/html"

_LINE = {"type": "object", "description": "One line; the stream is one JSON object a line."}
_EVENT = {
    "type": "object",
    "description": "One event; its data is JSON, or [DONE].",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
_STREAMS = {EVENTS: _EVENT, LINES: _LINE, BYTES: {"type": "string", "format": "binary"}, HTML: {"type": "string"}}
_LOOKING = (400, 401, 404, 408, 417, 421, 431, 500, 501, 503)
_WORKING = (*_LOOKING, 413, 415, 429, 504)


class Reply(BaseModel):
    """A reply's body. Routes write their bodies by hand, and these models say what they hold at the least."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


def documented(
    reply: type[BaseModel] | Any,
    error: type[BaseModel],
    *,
    works: bool = True,
    stream: str = "",
    more: tuple[int, ...] = (),
) -> Responses:
    """The ``responses`` of a route: its reply, its ``stream`` by media type if it has one, and its errors."""
    fine: dict[str, Any] = {"description": "The reply."}
    if reply is not None:
        fine["model"] = reply
    if stream:
        fine["content"] = {stream: {"schema": _STREAMS[stream]}}
    statuses = sorted({*(_WORKING if works else _LOOKING), *more})
    responses: Responses = {200: fine}
    responses.update({status: {"model": error, "description": _MEANINGS[status]} for status in statuses})
    return responses


def json_body(*models: type[BaseModel]) -> dict[str, Any]:
    """The ``requestBody`` of a route that reads it by hand: the JSON of one of these."""
    schemas = [_schema(model) for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


@cache
def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema()
