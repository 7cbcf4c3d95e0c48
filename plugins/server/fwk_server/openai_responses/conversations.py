"""Conversations: items that are kept on the server, and that a response's input and output are added to."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import Frontend
from fwk_server._common import body
from fwk_server._common.caller import caller_of
from fwk_server._common.chat.items import new_id, read_items
from fwk_server._common.chat.models import array
from fwk_server._common.fields import CONTEXT, RequestFields
from fwk_server._common.paging import PAGE, DeletedReply, page
from fwk_server._common.records import Key
from fwk_server._common.replies import json_response, off_loop, read_as
from fwk_server._common.store import ObjectStore, UnknownObject
from fwk_server.openai_responses.replies import ConversationReply, ErrorReply, ItemsReply
from fwk_server.openai_responses.request import MAX_ID, Metadata

if TYPE_CHECKING:
    from fastapi import FastAPI

    from fwk_server._common.chat.dialect import ChatDialect

logger = logging.getLogger(__name__)

_ONE = "/v1/conversations/{conversation_id}"
_ITEMS = f"{_ONE}/items"
MAX_ITEMS = 20
"""Of a request, as OpenAI has it."""
_Items = Annotated[
    list[Any], Field(max_length=MAX_ITEMS), WithJsonSchema(array({"type": "object", "x-limit": CONTEXT}, MAX_ITEMS))
]


class ConversationBody(RequestFields):
    """``POST /v1/conversations``."""

    items: _Items | None = None
    metadata: Metadata | None = None


class UpdateBody(RequestFields):
    """``POST /v1/conversations/{conversation_id}``."""

    metadata: Metadata | None = None


class AddBody(RequestFields):
    """``POST /v1/conversations/{conversation_id}/items``."""

    items: _Items


Body = TypeVar("Body", ConversationBody, AddBody)
BODIES = {"/v1/conversations": ConversationBody, _ONE: UpdateBody, _ITEMS: AddBody}


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "maxLength": MAX_ID}}


class Conversations:
    """Those of all callers, in the store of the responses."""

    def __init__(self, store: ObjectStore, find: Callable[[Key], dict[str, Any]], frontend: Frontend) -> None:
        """find: the item of a tenant and an id. Raises ``UnknownObject``."""
        self._frontend = frontend
        self._store = store
        self._find = find

    def add_routes(self, app: FastAPI, dialect: ChatDialect) -> None:
        """Add the routes."""
        add = partial(dialect.route, app, error=ErrorReply)
        one, item = [_in_path("conversation_id")], [_in_path("conversation_id"), _in_path("item_id")]
        add("/v1/conversations", self.create, reply=ConversationReply)
        add(_ONE, self.retrieve, reply=ConversationReply, method="GET", parameters=one)
        add(_ONE, self.update, reply=ConversationReply, parameters=one)
        add(_ONE, self.delete, reply=DeletedReply, method="DELETE", parameters=one)
        add(_ITEMS, self.list_items, reply=ItemsReply, method="GET", parameters=[*one, *PAGE])
        add(_ITEMS, self.add_items, reply=ItemsReply, parameters=one)
        add(f"{_ITEMS}/{{item_id}}", self.retrieve_item, method="GET", parameters=item)
        add(f"{_ITEMS}/{{item_id}}", self.delete_item, reply=ConversationReply, method="DELETE", parameters=item)

    def items(self, key: Key) -> list[dict[str, Any]]:
        """What a conversation holds. Raises ``UnknownObject``."""
        return self._get(key, "conversation")["items"]

    def extend(self, key: Key, items: Iterable[dict[str, Any]]) -> None:
        """Add items to a conversation, unless it was deleted meanwhile, or is too large to be kept."""
        try:
            entry = self._get(key, "conversation")
            entry["items"] += items
            self._set(key, entry)
        except (UnknownObject, InvalidRequest) as error:
            logger.warning("a response is not added to its conversation: %s", error)

    def _get(self, key: Key, param: str) -> dict[str, Any]:
        return self._store.get(key, "conversation", param)

    async def _put(self, key: Key, entry: dict[str, Any]) -> None:
        self._set(key, entry)
        await self._store.flush()

    def _set(self, key: Key, entry: dict[str, Any]) -> None:
        if not self._store.put(key, entry, [item["id"] for item in entry["items"]]):
            raise InvalidRequest("the conversation is larger than --responses-store-bytes", "items")

    async def _read(self, request: Request, model: type[Body]) -> tuple[Body, list[dict[str, Any]]]:
        """The body and its items, read off the event loop."""
        tenant, data = caller_of(request).service.tenant, await body.read(request)

        def read() -> tuple[Body, list[dict[str, Any]]]:
            asked = body.validate(model, body.parse(data))
            return asked, read_items(asked.items or [], lambda name: self._find((tenant, name)), "items")

        return await off_loop(request, self._frontend, read)

    async def create(self, request: Request) -> Response:
        """Begin a conversation."""
        asked, items = await self._read(request, ConversationBody)
        told = {"id": new_id("conv"), "object": "conversation", "created_at": int(time.time())}
        told["metadata"] = asked.metadata or {}
        await self._put((caller_of(request).service.tenant, told["id"]), {"conversation": told, "items": items})
        return json_response(told)

    async def retrieve(self, request: Request) -> Response:
        """Tell of a conversation."""
        return json_response(self._get(_key(request), "conversation_id")["conversation"])

    async def update(self, request: Request) -> Response:
        """Change a conversation's metadata."""
        asked, _ = await read_as(UpdateBody, request, self._frontend)
        entry = self._get(_key(request), "conversation_id")
        entry["conversation"]["metadata"] = asked.metadata or {}
        await self._put(_key(request), entry)
        return json_response(entry["conversation"])

    async def delete(self, request: Request) -> Response:
        """Forget a conversation; the responses in it stay."""
        self._get(_key(request), "conversation_id")
        self._store.delete(_key(request))
        await self._store.flush()
        return json_response({"id": _key(request)[1], "object": "conversation.deleted", "deleted": True})

    async def list_items(self, request: Request) -> Response:
        """List what was said, the last first."""
        return json_response(page(request, self._get(_key(request), "conversation_id")["items"], "desc"))

    async def add_items(self, request: Request) -> Response:
        """Add to a conversation."""
        _, added = await self._read(request, AddBody)
        entry = self._get(_key(request), "conversation_id")
        if not added:
            raise InvalidRequest("items must not be empty", "items")
        entry["items"] += added
        await self._put(_key(request), entry)
        ends = {"first_id": added[0]["id"], "last_id": added[-1]["id"]}
        return json_response({"object": "list", "data": added, **ends, "has_more": False})

    async def retrieve_item(self, request: Request) -> Response:
        """Tell of an item."""
        _, _, item = self._item(request)
        return json_response(item)

    async def delete_item(self, request: Request) -> Response:
        """Take an item out of a conversation."""
        entry, place, _ = self._item(request)
        del entry["items"][place]
        await self._put(_key(request), entry)
        return json_response(entry["conversation"])

    def _item(self, request: Request) -> tuple[dict[str, Any], int, dict[str, Any]]:
        entry, name = self._get(_key(request), "conversation_id"), request.path_params["item_id"]
        for place, item in enumerate(entry["items"]):
            if item["id"] == name:
                return entry, place, item
        raise UnknownObject("item", name, "item_id")


def _key(request: Request) -> Key:
    return caller_of(request).service.tenant, request.path_params["conversation_id"]
