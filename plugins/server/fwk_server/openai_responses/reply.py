"""The events that build a response."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from fwk_server._common.chat.dialect import Running
from fwk_server._common.chat.items import new_id
from fwk_server._common.logprobs import TokenTexts, chat_logprobs
from fwk_server.openai_responses.request import ResponsesBody
from fwk_server.openai_responses.response import new_response, usage_of
from fwk_server.openai_responses.server_tools import ServerTools, listed
from fwk_server.openai_responses.tool_servers import ToolResult


class Writer:
    """Writes one response: its items grow with what the model says, and each change is an event."""

    def __init__(
        self,
        body: ResponsesBody,
        raw: Mapping[str, Any],
        running: Running,
        is_stored: bool,
        tokens: TokenTexts,
        tools: ServerTools,
    ) -> None:
        self._rounds = [running]
        self._tokens = tokens
        self._tools = tools
        self._pending_calls: list[int] = []  # of tool servers: their places in the output
        self._num_scores = 0  # told
        self._number = 0  # of the next event
        self._start = 0  # the newest round's first item
        self._open = ""  # the kind of item that grows
        self.output: list[dict[str, Any]] = []
        self.response = new_response(body, raw, running) | {"store": is_stored, "output": self.output}

    @property
    def _running(self) -> Running:
        """The newest round."""
        return self._rounds[-1]

    @property
    def id(self) -> str:
        return self.response["id"]

    @property
    def has_ended(self) -> bool:
        return self.response["status"] in ("completed", "incomplete")

    def opening(self) -> bytes:
        """The first events."""
        self.response["status"] = "in_progress"
        return self._whole("response.created") + self._whole("response.in_progress")

    def list_tools(self, labels: Iterable[str]) -> bytes:
        """The events of listing the tools of servers."""
        lines = b""
        for label in labels:
            item = {"id": new_id("mcpl"), "type": "mcp_list_tools", "server_label": label, "error": None}
            lines += self._add(item | {"tools": []}) + self._of_item("response.mcp_list_tools.in_progress")
            self.output[-1]["tools"] = listed(self._tools.by_label[label])
            lines += self._of_item("response.mcp_list_tools.completed") + self._done(len(self.output) - 1)
        self._start = len(self.output)
        return lines

    def begin_round(self, running: Running) -> None:
        """From now on the output is of another round, which has read the results of the calls."""
        self._num_scores, self._start = 0, len(self.output)
        self._rounds.append(running)

    @property
    def num_output_tokens(self) -> int:
        """Of all rounds so far."""
        return sum(running.num_output_tokens for running in self._rounds)

    def end_round(self) -> tuple[bytes, list[int]]:
        """The round has ended: the events of that, and the places of calls to be made now."""
        if self._running.reason == "length":
            return b"", []
        lines = self._close()
        pending, self._pending_calls = self._pending_calls, []
        return lines, pending

    @property
    def waits_for_client(self) -> bool:
        """Whether the newest round has asked for something that only the client can do."""
        places = range(self._start, len(self.output))
        return any(self.output[place]["type"] in ("function_call", "mcp_approval_request") for place in places)

    def begin_approved(self, request: Mapping[str, Any]) -> tuple[bytes, int]:
        """A call that the client has approved: its first events, and its place."""
        lines = self._begin_call(request["name"], request["server_label"], request["id"])
        self.output[-1]["arguments"] = request["arguments"]
        lines += self._close()
        return lines, self._pending_calls.pop()

    def end_call(self, place: int, result: ToolResult) -> bytes:
        """The last events of a call."""
        status = "completed" if result.error is None else "failed"
        self.output[place] |= {"output": result.output, "error": result.error, "status": status}
        return self._of(place, f"response.mcp_call.{status}") + self._done(place)

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

    def finish(self, is_cut: bool = False) -> bytes:
        """The last events: what was open is closed, and the response has ended as the engine said.

        ``is_cut``: there is no token left for another round.
        """
        lines = b"" if len(self.output) > self._start else self._begin("message")
        is_cut = is_cut or self._running.reason == "length"
        lines += self._close("incomplete" if is_cut else "completed")
        lines += self._abandon_calls()
        self.response["usage"] = usage_of(self._rounds)
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
            if self._open != "mcp_approval_request":
                self.output[-1]["status"] = "incomplete"
            self._open = ""
        self._abandon_calls()

    def _abandon_calls(self) -> bytes:
        """Calls that will not be made."""
        lines = b""
        for place in self._pending_calls:
            self.output[place]["status"] = "incomplete"
            lines += self._done(place)
        self._pending_calls = []
        return lines

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
            lines = self._close() + self._begin_named(call["id"], function["name"])
        if function.get("arguments"):
            self.output[-1]["arguments"] += function["arguments"]
            if self._open != "mcp_approval_request":  # there are no events of how one grows
                lines += self._of_item(f"response.{self._open}_arguments.delta", delta=function["arguments"])
        return lines

    def _begin_named(self, call_id: str, name: str) -> bytes:
        """A call of a tool: the client's, or a tool server's, with the client's approval or without."""
        known = self._tools.by_name.get(name)
        if known is None:
            self._open = "function_call"
            fields = {"call_id": call_id, "name": name, "arguments": ""}
            return self._add({"id": new_id("fc"), "type": "function_call", "status": "in_progress", **fields})
        if not known.needs_approval:
            return self._begin_call(name, known.server.label, None)
        self._open = "mcp_approval_request"
        fields = {"server_label": known.server.label, "name": name, "arguments": ""}
        return self._add({"id": new_id("mcpr"), "type": "mcp_approval_request", **fields})

    def _begin_call(self, name: str, label: str, approved: str | None) -> bytes:
        self._open = "mcp_call"
        fields = {"server_label": label, "name": name, "arguments": "", "approval_request_id": approved}
        item = {"id": new_id("mcp"), "type": "mcp_call", "status": "in_progress", "output": None, "error": None}
        return self._add(item | fields) + self._of_item("response.mcp_call.in_progress")

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
        self._open = ""
        if kind == "mcp_approval_request":
            return self._done(len(self.output) - 1)
        if kind == "mcp_call":  # it is not done before it was made
            self._pending_calls.append(len(self.output) - 1)
            return self._of_item("response.mcp_call_arguments.done", arguments=item["arguments"])
        item["status"] = status
        if kind == "function_call":
            told = {"arguments": item["arguments"], "name": item["name"]}
            lines = self._of_item("response.function_call_arguments.done", **told)
        else:
            [part] = item["content"]
            name = "reasoning_text" if kind == "reasoning" else "output_text"
            more = {} if kind == "reasoning" else {"logprobs": part["logprobs"]}
            lines = self._part(f"response.{name}.done", text=part["text"], **more)
            lines += self._part("response.content_part.done", part=part)
        return lines + self._done(len(self.output) - 1)

    def _done(self, place: int) -> bytes:
        return self._event("response.output_item.done", output_index=place, item=self.output[place])

    def _part(self, kind: str, **data: Any) -> bytes:
        return self._of_item(kind, content_index=0, **data)

    def _of_item(self, kind: str, **data: Any) -> bytes:
        return self._of(len(self.output) - 1, kind, **data)

    def _of(self, place: int, kind: str, **data: Any) -> bytes:
        return self._event(kind, item_id=self.output[place]["id"], output_index=place, **data)

    def _whole(self, kind: str) -> bytes:
        return self._event(kind, response=self.response)

    def _event(self, kind: str, **data: Any) -> bytes:
        told = {"type": kind, "sequence_number": self._number, **data}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(told) + b"\n\n"
