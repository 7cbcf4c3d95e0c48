"""OpenAI's Responses API: ``/v1/responses``, with streaming events, stored responses and work in the background.

A response is kept in memory, and for the key alone that asked for it, until newer ones need the room
(``--responses-store-bytes``): ``previous_response_id``, retrieving, deleting and cancelling find it there. With
``--files-dir`` the next server has it, too, and makes those in the background anew that were under way, calls of tool
servers among them; without it nothing is left after a restart. One in the background whose engine died is made anew,
too, unless it has a stream of events. ``store`` false keeps nothing. Conversations
(``/v1/conversations``) are kept there, too.
Thinking comes as reasoning items whose ``content`` is in the clear, so there is nothing encrypted, and clients that
keep the items themselves send them back as they came. ``/v1/responses/compact`` has the model say a conversation in
short; its item is in the clear as well. ``/v1/responses/input_tokens`` counts a prompt.

Tools are functions of the client's, and the tools of the operator's tool servers (``--tool-server``), which this server
calls itself while it makes the response. Tools of other types (``web_search``, ``custom``, ``namespace``, ...) are not
offered to the model: the log says so the first time, and the response's ``tools`` are without them. Unknown fields are
ignored; ``--strict-requests`` refuses both. Fields of chat completions, files and prompts kept on a server are refused
by name. Nothing is cut from a prompt: with ``truncation: auto`` too, one that does not fit is refused.

The events of a response made with both ``background`` and ``stream`` are stored with it: a client that lost its stream
continues with ``GET /v1/responses/{id}?stream=true&starting_after=N``, while it is made and afterwards.
"""

from pydantic import field_validator

from fwk import DialectSpec, hookimpl, option
from fwk_server._common.batch_options import KeepingOptions


class ResponsesOptions(KeepingOptions):
    """Options of ``dialects.openai-responses``."""

    responses_store_bytes: int = option(
        64 * 2**20,
        "Memory for conversations, stored responses and what led to them; the oldest go first. 0 stores none.",
        ge=0,
        le=2**40,
    )
    max_background_responses: int = option(
        64, "Responses in the background at a time; one more is answered with 429.", ge=1, le=65_536
    )
    strict_requests: bool = option(
        False,
        "Refuse chat, completions and responses requests that name no model, or with a field, or a type of tool, that "
        "is neither read nor documented by a known server.",
    )
    tool_server: tuple[str, ...] = option(
        (), "MCP servers whose tools /v1/responses may call, as [NAME=]URL: search=http://localhost:8001/mcp."
    )
    tool_server_tokens: str | None = option(
        None,
        "What tool servers ask of their clients, sent as a bearer token: NAME=TOKEN[,NAME=TOKEN...].",
        is_secret=True,
        needs="tool_server",
        pattern=r"^[^=,\s]+=[^=,\s]+(,[^=,\s]+=[^,\s]+)*$",
    )
    tool_server_timeout: float = option(
        60.0,
        "Seconds that a tool server may take to list its tools, or for a call.",
        needs="tool_server",
        gt=0,
        le=3600,
    )

    @field_validator("tool_server", mode="before")
    @classmethod
    def _split(cls, given: object) -> object:
        words = [given] if isinstance(given, str) else given
        if not isinstance(words, (list, tuple)):
            return words
        return tuple(word for text in words for word in (text.split(",") if isinstance(text, str) else [text]))

    @field_validator("tool_server")
    @classmethod
    def _are_urls(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        from fwk_server.openai_responses.tool_server_url import label_and_url  # noqa: PLC0415 - only where it is given

        if "demo" in given:
            raise ValueError("demo: there are no tools for demonstration here: give the URL of an MCP server")
        labels = [label_and_url(text)[0] for text in given]
        if len(set(labels)) < len(labels):
            raise ValueError("two tool servers have the same name: call them apart, as NAME=URL")
        return given


@hookimpl
def dialects() -> list[DialectSpec]:
    return [
        DialectSpec(
            name="openai-responses",
            load="fwk_server.openai_responses.dialect:ResponsesDialect",
            options=ResponsesOptions,
            summary="OpenAI's Responses API: events, tools, reasoning items, stored responses, conversations",
        )
    ]
