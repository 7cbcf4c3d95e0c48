"""The response object, before there is anything in it, and its counts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from fwk_server._common.chat.dialect import Running
from fwk_server._common.chat.items import new_id
from fwk_server.openai_responses.request import ResponsesBody


def new_response(body: ResponsesBody, raw: Mapping[str, Any], running: Running) -> dict[str, Any]:
    """The response before its first item: what was asked, and the settings that hold."""
    sampling = running.call.item.sampling
    reasoning = body.reasoning or {}
    text = body.text or {}
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued",
        "background": bool(body.background),
        "conversation": {"id": body.conversation_id} if body.conversation_id is not None else None,
        "error": None,
        "frequency_penalty": sampling.frequency_penalty,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": body.model or running.frontend.card.name,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": sampling.presence_penalty,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": body.safety_identifier,
        "service_tier": body.service_tier or "default",
        "temperature": sampling.temperature,
        "text": {"format": text.get("format") or {"type": "text"}, "verbosity": text.get("verbosity") or "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": [
            {"strict": None, "parameters": None, **tool} if tool["type"] == "function" else tool
            for tool in raw.get("tools") or []
        ],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def usage_of(rounds: Sequence[Running]) -> dict[str, Any]:
    """The tokens of all rounds, counted."""
    counts = [running.usage.body() for running in rounds]
    cached = sum(count["prompt_tokens_details"]["cached_tokens"] for count in counts)
    return {
        "input_tokens": sum(count["prompt_tokens"] for count in counts),
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": sum(count["completion_tokens"] for count in counts),
        "output_tokens_details": {"reasoning_tokens": sum(running.answer.reasoning_tokens for running in rounds)},
        "total_tokens": sum(count["total_tokens"] for count in counts),
    }
