"""Anthropic's Messages API: ``/v1/messages``, ``/v1/messages/count_tokens`` and ``/v1/messages/batches``.

Text, images in base64, documents that are text, tools, thinking and an answer that begins with the last message work as
there; other documents, tools that the API runs itself and MCP servers are refused by name. ``cache_control`` says
nothing, as the prefix cache keeps what was computed without being told, and ``budget_tokens`` is kept where the server
can end the model's thinking. The key may stand in ``x-api-key``.

``anthropic-beta`` is read by nothing: what it announces is done or refused by its fields. Edits of
``context_management`` do nothing below their threshold, and a conversation past it is refused. Batches are kept as
those of OpenAI's API. Images that a tool returned stand in a user's message behind its result.
"""

from fwk import DialectSpec, hookimpl
from fwk_server._common.batch_options import BatchOptions


class AnthropicOptions(BatchOptions):
    """Options of ``dialects.anthropic``."""


@hookimpl
def dialects() -> list[DialectSpec]:
    return [
        DialectSpec(
            name="anthropic",
            load="fwk_server.anthropic.dialect:AnthropicDialect",
            options=AnthropicOptions,
            summary="Anthropic's Messages API: messages, streaming events, tools, thinking, count_tokens, batches",
        )
    ]
