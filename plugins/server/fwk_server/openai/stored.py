"""Chat completions that were made with ``store``: listed, told again and forgotten, for the key that asked for them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import Frontend
from fwk_server._common import body
from fwk_server._common.body import want
from fwk_server._common.caller import caller_of
from fwk_server._common.chat.call import ChatCall
from fwk_server._common.documented import Reply, documented, json_body
from fwk_server._common.fields import RequestFields
from fwk_server._common.paging import PAGE, DeletedReply, ListReply, page
from fwk_server._common.records import Key, Records
from fwk_server._common.replies import Endpoint, closed_on_disconnect, json_response, read_as
from fwk_server._common.store import ObjectStore
from fwk_server.openai.bodies import ChatBody, ErrorBody

if TYPE_CHECKING:
    from fastapi import FastAPI

MAX_ID = 512
MAX_PAIRS = 16
_ALL = "/v1/chat/completions"
ONE = "/v1/chat/completions/{completion_id}"
_ID = {"name": "completion_id", "in": "path", "required": True, "schema": {"type": "string", "maxLength": MAX_ID}}
_MODEL = {"name": "model", "in": "query", "schema": {"type": "string", "maxLength": MAX_ID}}
_FILTER = {"name": "metadata", "in": "query", "style": "deepObject", "schema": {"type": "object"}}

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=MAX_PAIRS)
]


class UpdateBody(RequestFields):
    """``POST /v1/chat/completions/{completion_id}``."""

    metadata: Metadata | None


class _Given(RequestFields):
    metadata: Metadata | None = None


def metadata_of(call: ChatCall) -> dict[str, str]:
    """What a request wants to find its completion by. Raises ``InvalidRequest``."""
    return body.validate(_Given, {"metadata": call.body.metadata}).metadata or {}


class StoredCompletions:
    """The routes, and what they tell of."""

    def __init__(self, max_bytes: int, records: Records, frontend: Frontend) -> None:
        self._frontend = frontend
        self._store = ObjectStore(max_bytes, records, "completion")
        self.load = self._store.load

    async def put(self, call: ChatCall, metadata: dict[str, str], reply: dict[str, Any], tenant: str) -> None:
        """Keep a completion, if it fits at all."""
        entry = {"completion": reply | {"metadata": metadata}, "messages": call.body.messages}
        if self._store.put((tenant, reply["id"]), entry):
            await self._store.flush()

    def add_routes(self, app: FastAPI) -> None:
        """Add the routes."""
        add = partial(_add, app)
        add("GET", _ALL, self.list_completions, ListReply, [*PAGE, _MODEL, _FILTER])
        add("GET", ONE, self.retrieve_completion, ChatBody, [_ID])
        add("POST", ONE, self.update_completion, ChatBody, [_ID])
        add("DELETE", ONE, self.delete_completion, DeletedReply, [_ID])
        add("GET", f"{ONE}/messages", self.list_messages, ListReply, [_ID, *PAGE])

    def _get(self, request: Request) -> dict[str, Any]:
        return self._store.get(_key(request), "completion", "completion_id")

    async def list_completions(self, request: Request) -> Response:
        """List the stored completions, the first used first; of one model, or with some metadata."""
        query = request.query_params
        if len(query.get("model", "")) > MAX_ID:
            raise InvalidRequest(f"model has more than {MAX_ID} characters", "model")
        wanted = {name[len("metadata[") : -1]: value for name, value in query.items() if name.startswith("metadata[")}
        tenant = caller_of(request).service.tenant
        found = [
            told
            for entry in self._store.of(tenant)
            if (told := entry["completion"])["model"] == query.get("model", told["model"])
            and wanted.items() <= told["metadata"].items()
        ]
        return json_response(page(request, sorted(found, key=lambda told: told["created"]), "asc"))

    async def retrieve_completion(self, request: Request) -> Response:
        """Tell of a stored completion."""
        return json_response(self._get(request)["completion"])

    async def update_completion(self, request: Request) -> Response:
        """Change the metadata of a stored completion."""
        asked, _ = await read_as(UpdateBody, request, self._frontend)
        entry = self._get(request)
        entry["completion"]["metadata"] = asked.metadata or {}
        if not self._store.put(_key(request), entry):
            raise InvalidRequest("the completion is larger than --completions-store-bytes", "metadata")
        await self._store.flush()
        return json_response(entry["completion"])

    async def delete_completion(self, request: Request) -> Response:
        """Forget a stored completion."""
        self._get(request)
        self._store.delete(_key(request))
        await self._store.flush()
        return json_response({"id": _key(request)[1], "object": "chat.completion.deleted", "deleted": True})

    async def list_messages(self, request: Request) -> Response:
        """List the messages that a stored completion answers."""
        name = _key(request)[1]
        messages = want(self._get(request)["messages"], list, "an array of messages", "messages")
        told = [{"id": f"{name}-{i}", **message} for i, message in enumerate(messages)]
        return json_response(page(request, told, "asc"))


def _key(request: Request) -> Key:
    return caller_of(request).service.tenant, request.path_params["completion_id"]


def _add(
    app: FastAPI, method: str, path: str, endpoint: Endpoint, reply: type[Reply], parameters: list[dict[str, Any]]
) -> None:
    extra: dict[str, Any] = {"parameters": parameters}
    if method == "POST":
        extra["requestBody"] = json_body(UpdateBody)
    app.add_api_route(
        path,
        closed_on_disconnect(endpoint),
        methods=[method],
        response_model=None,
        name=f"{endpoint.__name__}_{method}",
        description=endpoint.__doc__,
        responses=documented(reply, ErrorBody, works=method == "POST"),
        openapi_extra=extra,
    )
