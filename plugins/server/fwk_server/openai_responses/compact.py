"""``POST /v1/responses/compact``: what was said, in short, for conversations that would outgrow the context.

The model itself says it in short. What the user said last stays as it is.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

from pydantic import Field

from fwk_server._common.chat.dialect import Running
from fwk_server._common.chat.items import messages_of, new_compaction, new_id
from fwk_server._common.chat.models import MAX_LABEL, MAX_NAME
from fwk_server._common.fields import CONTEXT, RequestFields, bounded
from fwk_server.openai_responses.response import usage_of

MAX_ID = 128
MAX_SUMMARY = 512
"""Tokens."""
_TASK = (
    "Write a short summary of our conversation so far for somebody who continues it: what is wanted, what was decided, "
    "what is done, and what is still open. Keep names and numbers. Write the summary alone."
)

_Items = Annotated[list[Any], bounded("array", CONTEXT, items={"type": "object", "x-limit": CONTEXT})]


class CompactBody(RequestFields):
    """``POST /v1/responses/compact``."""

    model: Annotated[str, Field(max_length=MAX_NAME)]
    input: Annotated[str, bounded("string", CONTEXT)] | _Items | None = None
    instructions: Annotated[str, bounded("string", CONTEXT)] | None = None
    previous_response_id: Annotated[str, Field(max_length=MAX_ID)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=MAX_LABEL)] | None = None


def compact_fields(asked: CompactBody, context: list[dict[str, Any]]) -> dict[str, Any]:
    """The chat request that makes a summary."""
    task = {"role": "user", "content": _TASK}
    fields = {"model": asked.model, "messages": [*messages_of(asked.instructions, context), task]}
    return fields | {"max_tokens": MAX_SUMMARY, "prompt_cache_key": asked.prompt_cache_key}


async def compacted(running: Running, context: list[dict[str, Any]]) -> dict[str, Any]:
    """The reply: the users' last message, and one item in place of all before it."""
    message = await running.whole()
    users = [item for item in context if item["type"] == "message" and item["role"] == "user"]
    return {
        "id": new_id("resp"),
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [*users[-1:], new_compaction(message["content"] or "")],
        "usage": usage_of([running]),
    }
