"""The rounds of a response: what the model says, and between two rounds the calls of tool servers that it asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import Frontend
from fwk_server._common.body import shown
from fwk_server._common.caller import Caller
from fwk_server._common.chat.dialect import Running
from fwk_server._common.chat.items import approval_responses
from fwk_server.openai_responses.job import Job
from fwk_server.openai_responses.request import MAX_CALLS, chat_fields, later_choice
from fwk_server.openai_responses.server_tools import ServerTools
from fwk_server.openai_responses.tool_servers import ToolResult

Prepare = Callable[[Mapping[str, Any], Caller], Running]

_NO_MORE = {
    "type": "mcp_protocol_error",
    "code": -32000,
    "message": "no more tools are called for this response: answer with what is known",
}


def approved(inputs: list[dict[str, Any]], context: list[dict[str, Any]], tools: ServerTools) -> list[dict[str, Any]]:
    """The requests for approval that the client agrees to. Raises ``InvalidRequest``."""
    asked = {item["id"]: item for item in context if item["type"] == "mcp_approval_request"}
    answers = approval_responses(inputs)
    made = {item["approval_request_id"] for item in context if item["type"] == "mcp_call"}
    for name, answer in answers.items():
        if name not in asked:
            raise InvalidRequest(
                f"input: there is no request for approval {shown(name)}: name the response that has it by "
                "previous_response_id, or send its items",
                "input",
            )
        known = tools.by_name.get(asked[name]["name"])
        if answer["approve"] and (known is None or known.server.label != asked[name]["server_label"]):
            raise InvalidRequest(
                f"tools: {shown(asked[name]['name'])}, which is approved, is not among the tools of this request: "
                "send the tools again",
                "tools",
            )
    return [asked[name] for name, answer in answers.items() if answer["approve"] and name not in made]


async def events(job: Job, frontend: Frontend, prepare: Prepare, *, is_whole: bool) -> AsyncGenerator[bytes, None]:
    """The events of a response, from the first to the last. The first wait for the engine, unless calls come first.

    ``is_whole``: the events are not sent, so a round may come in one piece.
    """
    writer = job.writer
    listed = {item["server_label"] for item in job.context if item["type"] == "mcp_list_tools"}
    lines = writer.opening() + writer.list_tools(label for label in job.tools.by_label if label not in listed)
    num_calls = len(job.approved)
    if job.approved:
        begun = [writer.begin_approved(request) for request in job.approved]
        yield lines + b"".join(first for first, _ in begun)
        yield await _call_all(job, [place for _, place in begun], num_calls)
        lines = b""
        await _next_round(job, frontend, prepare, is_last=False)
    most = job.asked.max_tool_calls or MAX_CALLS
    while True:
        if is_whole:
            lines += writer.take(await job.running.whole())
        else:
            async with aclosing(job.running.news()) as news:
                async for added, _ in news:
                    yield lines + writer.take(added)
                    lines = b""
        ended, places = writer.end_round()
        lines += ended
        if not places:
            yield lines + writer.finish()
            return
        yield lines
        yield await _call_all(job, places, max(most - num_calls, 0))
        num_calls += len(places)
        if writer.waits_for_client:
            yield writer.finish()
            return
        limit = job.asked.max_output_tokens
        if limit is not None and writer.num_output_tokens >= limit:
            yield writer.finish(is_cut=True)
            return
        await _next_round(job, frontend, prepare, is_last=num_calls >= most)
        lines = b""


async def _call_all(job: Job, places: list[int], num_allowed: int) -> bytes:
    """Make calls, all at once: their last events, in the order in which the model asked for them."""
    items = [job.writer.output[place] for place in places]
    results = await asyncio.gather(*(_call(job.tools, item) for item in items[:num_allowed]))
    results += [ToolResult(error=_NO_MORE)] * (len(items) - len(results))
    return b"".join(job.writer.end_call(place, result) for place, result in zip(places, results, strict=True))


async def _call(tools: ServerTools, item: Mapping[str, Any]) -> ToolResult:
    return await tools.by_name[item["name"]].server.call(item["name"], item["arguments"])


async def _next_round(job: Job, frontend: Frontend, prepare: Prepare, *, is_last: bool) -> None:
    """Have the model read the results of the calls. In the last round it can call nothing more."""
    raw = dict(job.raw)
    asked = job.asked.model_copy(update={"tool_choice": "none" if is_last else later_choice(job.asked.tool_choice)})
    if asked.max_output_tokens is not None:
        raw["max_output_tokens"] = asked.max_output_tokens - job.writer.num_output_tokens
    context = [*job.context, *job.writer.output]
    fields = await frontend.run_blocking(chat_fields, asked, raw, context, job.tools)
    job.running = await frontend.run_blocking(prepare, fields, job.caller)
    job.writer.begin_round(job.running)
