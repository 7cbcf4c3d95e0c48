"""Anthropic's Messages API: ``/v1/messages`` and ``/v1/messages/count_tokens``.

Text, images in base64, documents that are text, tools, thinking and an answer that begins with the last message work as
there; other documents, tools that the API runs itself and MCP servers are refused by name. ``cache_control`` says
nothing, as the prefix cache keeps what was computed without being told, and ``budget_tokens`` is kept where the server
can end the model's thinking. The key may stand in ``x-api-key``.
"""

from fwk import DialectSpec, hookimpl


@hookimpl
def dialects() -> list[DialectSpec]:
    return [
        DialectSpec(
            name="anthropic",
            load="fwk_server.anthropic.dialect:AnthropicDialect",
            summary="Anthropic's Messages API: messages, streaming events, tools, thinking, count_tokens",
        )
    ]
