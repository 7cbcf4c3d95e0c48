"""What the routes answer, for the documentation of the API."""

from __future__ import annotations

from typing import Any

from fwk_server._common.documented import Reply


class ResponseReply(Reply):
    """A response."""

    id: str
    object: str
    status: str
    output: list[dict[str, Any]]


class ConversationReply(Reply):
    """A conversation."""

    id: str
    object: str
    created_at: int
    metadata: dict[str, Any]


class TokensReply(Reply):
    """The tokens of an input, counted."""

    object: str
    input_tokens: int


class CompactedReply(Reply):
    """A conversation in short."""

    id: str
    object: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class ItemsReply(Reply):
    """Items of a request."""

    object: str
    data: list[dict[str, Any]]
    has_more: bool


class ToolServersReply(Reply):
    """The tool servers that a request may name."""

    object: str
    data: list[dict[str, Any]]


class ErrorReply(Reply):
    """Every error."""

    error: dict[str, Any]
