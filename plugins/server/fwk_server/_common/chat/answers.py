"""One choice's text on its way through the parsers of thinking and tool calls."""

from __future__ import annotations

import uuid
from typing import Any

from fwk.interfaces.dialect import OutputDelta
from fwk.interfaces.parser import Parsed, StreamParser, ToolCallDelta, ToolParser


class Answer:
    """Turns deltas into what a message is made of: thinking first, and calls out of what is not thinking."""

    def __init__(
        self,
        reasoning: StreamParser | None,
        tools: ToolParser | None,
        *,
        is_parallel: bool,
        is_silent: bool = False,
        is_legacy: bool = False,
    ) -> None:
        self._is_legacy = is_legacy  # one call, as ``function_call``
        self._reasoning = reasoning
        self._tools = tools
        self._is_parallel = is_parallel
        self._is_silent = is_silent  # thinking is not told
        self._num_tokens = 0  # before the answer's first character
        self._has_answered = False
        self._thoughts: list[str] = []
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls so far, as the API lists them."""
        return self._calls

    @property
    def reasoning_tokens(self) -> int:
        """Tokens that came before the answer, when there was any thinking."""
        return self._num_tokens if self._thoughts else 0

    @property
    def has_reasoning(self) -> bool:
        """Whether thinking is told from the answer."""
        return self._reasoning is not None

    def take(self, delta: OutputDelta) -> dict[str, Any]:
        """The news of a delta, as the ``delta`` of a chunk."""
        parsed = self._parse(delta.text, delta.finish_reason is not None)
        self._has_answered = self._has_answered or bool(parsed.content or parsed.tool_calls)
        if not self._has_answered:
            self._num_tokens += len(delta.token_ids)
        news: dict[str, Any] = {}
        if parsed.reasoning:
            self._thoughts.append(parsed.reasoning)
        if parsed.reasoning and not self._is_silent:
            news["reasoning_content"] = parsed.reasoning
        if parsed.content:
            self._content.append(parsed.content)
            news["content"] = parsed.content
        calls = self._call_news(parsed.tool_calls)
        if not calls:
            return news
        return news | ({"function_call": calls[0]["function"]} if self._is_legacy else {"tool_calls": calls})

    def message(self, echo: str) -> dict[str, Any]:
        """The whole message."""
        content = echo + "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not self._calls else None}
        message["refusal"] = None
        if self._reasoning is not None and not self._is_silent:
            message["reasoning_content"] = "".join(self._thoughts) or None
        if self._calls and self._is_legacy:
            message["function_call"] = self._calls[0]["function"]
        elif self._calls:
            message["tool_calls"] = self._calls
        return message

    def finish_reason(self, reason: str | None) -> str | None:
        """As the API names it."""
        if reason != "stop" or not self._calls:
            return reason
        return "function_call" if self._is_legacy else "tool_calls"

    def _parse(self, text: str, is_last: bool) -> Parsed:
        parsed = _run(self._reasoning, text, is_last) if self._reasoning is not None else Parsed(content=text)
        if self._tools is None:
            return parsed
        found = _run(self._tools, parsed.content, is_last)
        return Parsed(found.content, parsed.reasoning, found.tool_calls)

    def _call_news(self, deltas: list[ToolCallDelta]) -> list[dict[str, Any]]:
        """One entry for each call; id, type and name come with a call's first."""
        news: dict[int, dict[str, Any]] = {}
        for delta in deltas:
            if delta.index > 0 and not self._is_parallel:
                continue  # the client takes one call only
            if delta.name is not None:
                function = {"name": delta.name, "arguments": ""}
                self._calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
                news[delta.index] = {"index": delta.index, **self._calls[-1], "function": dict(function)}
            entry = news.setdefault(delta.index, {"index": delta.index, "function": {"arguments": ""}})
            entry["function"]["arguments"] += delta.arguments
            self._calls[delta.index]["function"]["arguments"] += delta.arguments
        return list(news.values())


def _run(parser: StreamParser, text: str, is_last: bool) -> Parsed:
    parsed = parser.feed(text)
    return parsed + parser.finish() if is_last else parsed
