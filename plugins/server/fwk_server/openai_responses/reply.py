"""The response object, and the events that build it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import orjson

from fwk_server._common.chat.dialect import Running
from fwk_server._common.logprobs import TokenTexts, chat_logprobs
from fwk_server.openai_responses.items import new_id
from fwk_server.openai_responses.request import ResponsesBody


class Writer:
    """Writes one response: its items grow with what the model says, and each change is an event."""

    def __init__(
        self, body: ResponsesBody, raw: Mapping[str, Any], running: Running, is_stored: bool, tokens: TokenTexts
    ) -> None:
        self._running = running
        self._tokens = tokens
        self._num_scores = 0  # told
        self._number = 0  # of the next event
        self._open = ""  # the kind of item that grows: message, reasoning or function_call
        self.output: list[dict[str, Any]] = []
        self.response = _frame(body, raw, running) | {"store": is_stored, "output": self.output}

    @property
    def id(self) -> str:
        return self.response["id"]

    def opening(self) -> bytes:
        """The first events."""
        self.response["status"] = "in_progress"
        return self._whole("response.created") + self._whole("response.in_progress")

    def take(self, added: Mapping[str, Any]) -> bytes:
        """The events of a piece of the answer, told as the ``delta`` of a chat completion's chunk."""
        lines = b""
        if added.get("reasoning_content"):
            lines += self._text("reasoning", added["reasoning_content"])
        if added.get("content"):
            lines += self._text("message", added["content"])
        for call in added.get("tool_calls") or ():
            lines += self._call(call)
        return lines

    def finish(self) -> bytes:
        """The last events: what was open is closed, and the response has ended as the engine said."""
        lines = b"" if self.output else self._begin("message")
        is_cut = self._running.reason == "length"
        lines += self._close("incomplete" if is_cut else "completed")
        self.response["usage"] = usage(self._running)
        if is_cut:
            return lines + self.end("incomplete", incomplete_details={"reason": "max_output_tokens"})
        return lines + self.end("completed", completed_at=int(time.time()))

    def fail(self, message: str) -> bytes:
        """The last event when the engine failed."""
        self._settle()
        return self.end("failed", error={"code": "server_error", "message": message})

    def cancel(self) -> None:
        """End the response where it stands."""
        self._settle()
        self.response["status"] = "cancelled"

    def end(self, status: str, **fields: Any) -> bytes:
        """The response's last event."""
        self.response |= {"status": status, **fields}
        return self._whole(f"response.{status}")

    def _settle(self) -> None:
        if self._open:
            self.output[-1]["status"] = "incomplete"
            self._open = ""

    def _text(self, kind: str, text: str) -> bytes:
        lines = b"" if self._open == kind else self._close() + self._begin(kind)
        part = self.output[-1]["content"][0]
        part["text"] += text
        if kind == "reasoning":
            return lines + self._part("response.reasoning_text.delta", delta=text)
        scores = self._scores()
        part["logprobs"] += scores
        return lines + self._part("response.output_text.delta", delta=text, logprobs=scores)

    def _scores(self) -> list[dict[str, Any]]:
        """The log-probabilities of the answer's newest tokens; empty where none were asked for."""
        new = self._running.scores[self._num_scores :]
        self._num_scores += len(new)
        return chat_logprobs(self._tokens, new, self._running.call.num_top)["content"] if new else []

    def _call(self, call: Mapping[str, Any]) -> bytes:
        lines = b""
        function = call["function"]
        if call.get("id") is not None:
            lines = self._close()
            self._open = "function_call"
            fields = {"call_id": call["id"], "name": function["name"], "arguments": ""}
            lines += self._add({"id": new_id("fc"), "type": "function_call", "status": "in_progress", **fields})
        if function.get("arguments"):
            self.output[-1]["arguments"] += function["arguments"]
            lines += self._of_item("response.function_call_arguments.delta", delta=function["arguments"])
        return lines

    def _begin(self, kind: str) -> bytes:
        self._open = kind
        if kind == "reasoning":
            item: dict[str, Any] = {"id": new_id("rs"), "type": kind, "summary": []}
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = {"id": new_id("msg"), "type": kind, "role": "assistant"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        lines = self._add(item | {"content": [], "status": "in_progress"})
        self.output[-1]["content"].append(part)
        return lines + self._part("response.content_part.added", part=part)

    def _add(self, item: dict[str, Any]) -> bytes:
        self.output.append(item)
        return self._event("response.output_item.added", output_index=len(self.output) - 1, item=item)

    def _close(self, status: str = "completed") -> bytes:
        """End the item that is open."""
        if not self._open:
            return b""
        item, kind = self.output[-1], self._open
        item["status"], self._open = status, ""
        if kind == "function_call":
            told = {"arguments": item["arguments"], "name": item["name"]}
            lines = self._of_item("response.function_call_arguments.done", **told)
        else:
            [part] = item["content"]
            name = "reasoning_text" if kind == "reasoning" else "output_text"
            more = {} if kind == "reasoning" else {"logprobs": part["logprobs"]}
            lines = self._part(f"response.{name}.done", text=part["text"], **more)
            lines += self._part("response.content_part.done", part=part)
        return lines + self._event("response.output_item.done", output_index=len(self.output) - 1, item=item)

    def _part(self, kind: str, **data: Any) -> bytes:
        return self._of_item(kind, content_index=0, **data)

    def _of_item(self, kind: str, **data: Any) -> bytes:
        return self._event(kind, item_id=self.output[-1]["id"], output_index=len(self.output) - 1, **data)

    def _whole(self, kind: str) -> bytes:
        return self._event(kind, response=self.response)

    def _event(self, kind: str, **data: Any) -> bytes:
        told = {"type": kind, "sequence_number": self._number, **data}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(told) + b"\n\n"


def _frame(body: ResponsesBody, raw: Mapping[str, Any], running: Running) -> dict[str, Any]:
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
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": body.model or running.frontend.card.name,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": body.safety_identifier,
        "service_tier": body.service_tier or "default",
        "temperature": sampling.temperature,
        "text": {"format": text.get("format") or {"type": "text"}, "verbosity": text.get("verbosity") or "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": [{"strict": None, "parameters": None, **tool} for tool in raw.get("tools") or []],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def usage(running: Running) -> dict[str, Any]:
    """The tokens, counted."""
    counts = running.usage.body()
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": running.answer.reasoning_tokens},
        "total_tokens": counts["total_tokens"],
    }
