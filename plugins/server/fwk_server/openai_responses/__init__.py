"""OpenAI's Responses API: ``/v1/responses``, with streaming events, stored responses and work in the background.

A response is kept in memory, and for the key alone that asked for it, until newer ones need the room
(``--responses-store-bytes``): ``previous_response_id``, retrieving, deleting and cancelling find it there, and after a
restart nothing is left. ``store`` false keeps nothing. Thinking comes as reasoning items whose ``content`` is in the
clear, so there is nothing encrypted, and clients that keep the items themselves send them back as they came.

Tools are functions; tools that OpenAI's service runs itself, images, files, prompts kept on a server, conversations
and ``truncation: auto`` are refused by name, and so is every field that is not known.

The events of a response made with both ``background`` and ``stream`` are stored with it: a client that lost its stream
continues with ``GET /v1/responses/{id}?stream=true&starting_after=N``, while it is made and afterwards.
"""

from fwk import DialectSpec, Options, hookimpl, option


class ResponsesOptions(Options):
    """Options of ``dialects.openai-responses``."""

    responses_store_bytes: int = option(
        64 * 2**20,
        "Memory for stored responses and what led to them; the oldest go first. 0 stores none.",
        ge=0,
        le=2**40,
    )
    max_background_responses: int = option(
        64, "Responses in the background at a time; one more is answered with 429.", ge=1, le=65_536
    )


@hookimpl
def dialects() -> list[DialectSpec]:
    return [
        DialectSpec(
            name="openai-responses",
            load="fwk_server.openai_responses.dialect:ResponsesDialect",
            options=ResponsesOptions,
            summary="OpenAI's Responses API: events, tools, reasoning items, stored and background responses",
        )
    ]
