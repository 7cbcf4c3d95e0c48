"""Lists that are told a page at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from fwk.errors import InvalidRequest
from fwk_server._common.body import shown
from fwk_server._common.documented import Reply

MAX_LISTED = 100
_MAX_ID = 128

PAGE: list[dict[str, Any]] = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED}},
    {"name": "order", "in": "query", "schema": {"type": "string", "enum": ["asc", "desc"]}},
    {"name": "after", "in": "query", "schema": {"type": "string", "maxLength": _MAX_ID}},
]
"""Parameters of the query."""


class ListReply(Reply):
    """What ``page`` makes, and lists that are told whole."""

    object: str
    data: list[dict[str, Any]]
    has_more: bool


class DeletedReply(Reply):
    """The reply to a deletion."""

    id: str
    deleted: bool


def page(request: Request, items: Sequence[dict[str, Any]], order: str) -> dict[str, Any]:
    """The part of a list that a query asks for. ``items``: the oldest first; ``order``: where the query has none."""
    query = request.query_params
    order, limit, after = query.get("order", order), query.get("limit", "20"), query.get("after")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order must be asc or desc, not {shown(order)}", "order")
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= MAX_LISTED):
        raise InvalidRequest(f"limit must be an integer from 1 to {MAX_LISTED}, not {shown(limit)}", "limit")
    listed = list(items) if order == "asc" else list(items)[::-1]
    if after is not None:
        names = [item["id"] for item in listed]
        if after not in names:
            raise InvalidRequest(f"after: the list has no {shown(after)}", "after")
        listed = listed[names.index(after) + 1 :]
    found = listed[: int(limit)]
    ends = {"first_id": found[0]["id"] if found else "", "last_id": found[-1]["id"] if found else ""}
    return {"object": "list", "data": found, **ends, "has_more": len(found) < len(listed)}
