"""What other dialects of chat share: a body is translated to OpenAI's chat fields, and runs as those do."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from itertools import accumulate
from types import UnionType
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from starlette.requests import Request

from fwk.errors import EngineDead, FwkError, NotServed
from fwk.interfaces.dialect import Dialect, DialectContext, OutputDelta
from fwk.types import TokenLogprobs
from fwk_server._common import body
from fwk_server._common.caller import Caller, caller_of
from fwk_server._common.chat.answers import Answer
from fwk_server._common.chat.call import ChatCall, check, prepare
from fwk_server._common.chat.outputs import Usage, run
from fwk_server._common.documented import Reply, documented, json_body
from fwk_server._common.replies import Endpoint, closed_on_disconnect, off_loop

if TYPE_CHECKING:
    from fastapi import FastAPI

Translate = Callable[[Mapping[str, Any]], dict[str, Any]]


class ErrorReply(Reply):
    """Every error."""

    error: Any


class Running:
    """A call while it runs: the news of its one answer, and its counts."""

    def __init__(self, call: ChatCall, dialect: ChatDialect) -> None:
        self.call = call
        self.frontend = dialect.frontend
        self.usage = Usage([call.item])
        [self.answer] = call.answers(self.frontend) or [Answer(None, None, is_parallel=True)]
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.num_output_tokens = 0
        self.scores: list[TokenLogprobs] = []  # of the answer's tokens, where they were asked for
        self._unplaced: list[TokenLogprobs] = []  # of tokens whose text is held back

    async def news(self) -> AsyncGenerator[tuple[dict[str, Any], OutputDelta], None]:
        """What each delta adds, as the ``delta`` of OpenAI's chunks. Closing it aborts the request."""
        async with aclosing(run(self.frontend, [self.call.item], self.usage)) as steps:
            async for _, deltas in steps:
                for delta in deltas:
                    self.num_output_tokens = delta.num_output_tokens
                    if delta.finish_reason is not None:
                        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
                    added = self.answer.take(delta)
                    self._place(added, delta)
                    yield added, delta

    def _place(self, added: Mapping[str, Any], delta: OutputDelta) -> None:
        """Scores belong to the answer when their tokens' text does; those of thinking, calls and marks are dropped."""
        if delta.logprobs is None:
            return
        self._unplaced += delta.logprobs
        if content := added.get("content", "").encode():
            ends = list(accumulate(len(self.frontend.text.token_bytes(entry.token_id)) for entry in self._unplaced))
            text = b"".join(self.frontend.text.token_bytes(entry.token_id) for entry in self._unplaced)
            start = max(text.find(content), 0)
            first, last = bisect_right(ends, start), bisect_left(ends, start + len(content)) + 1
            self.scores += self._unplaced[first:last]
            self._unplaced = self._unplaced[last:]
        elif added:
            self._unplaced = []

    async def whole(self) -> dict[str, Any]:
        """Run to the end: the message."""
        async with aclosing(self.news()) as news:
            async for _ in news:
                pass
        return self.answer.message(self.call.echo)

    @property
    def reason(self) -> str | None:
        """Why it ended, in OpenAI's words."""
        return self.answer.finish_reason(self.finish_reason)


class ChatDialect(Dialect):
    """A dialect whose bodies can be told in OpenAI's chat fields."""

    request_notes = body.NOTES

    def __init__(self, context: DialectContext) -> None:
        super().__init__(context)
        self.frontend = context.frontend

    def route(
        self,
        app: FastAPI,
        path: str,
        endpoint: Endpoint,
        *,
        reply: type[BaseModel] | UnionType = Reply,
        error: type[BaseModel] = ErrorReply,
        stream: str = "",
        method: str = "POST",
        parameters: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Add a route. The endpoint reads the body itself, which ``requests`` documents, and the ``parameters``.

        A POST that ``requests`` does not know has a body that is not read.
        """
        extra: dict[str, Any] = {"parameters": list(parameters)} if parameters else {}
        if method == "POST" and path in self.requests:
            extra["requestBody"] = json_body(self.requests[path])
        elif method == "POST":
            extra["requestBody"] = {"required": False, "content": {"application/json": {"schema": body.NOT_READ}}}
        app.add_api_route(
            path,
            closed_on_disconnect(endpoint),
            methods=[method],
            response_model=None,
            name=f"{type(self).__name__}_{endpoint.__name__}_{method}",
            description=endpoint.__doc__,
            responses=documented(reply, error, works=method == "POST", stream=stream),
            openapi_extra=extra or None,
        )

    async def read(self, request: Request, translate: Translate) -> tuple[Mapping[str, Any], Running]:
        """The body and the call it asks for, read and checked off the event loop."""
        data = await body.read(request)
        return await off_loop(request, self.frontend, self._prepare, data, translate, caller_of(request))

    def _prepare(self, data: bytes, translate: Translate, caller: Caller) -> tuple[Mapping[str, Any], Running]:
        raw = body.parse(data)
        return raw, self.prepared(translate(raw), caller)

    def prepared(self, fields: Mapping[str, Any], caller: Caller) -> Running:
        """A call of OpenAI's fields."""
        return Running(check(prepare(fields, self.frontend, caller), self.frontend), self)


def told(error: Exception) -> tuple[int, str]:
    """Status and sentence of an error inside a stream."""
    if isinstance(error, EngineDead):
        return 503, str(error)
    if isinstance(error, NotServed):
        return error.status, str(error)
    return 500, str(error) if isinstance(error, FwkError) else "internal server error"


def renamed(raw: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The fields of ``raw`` that are given, under other names."""
    return {ours: raw[name] for name, ours in names.items() if raw.get(name) is not None}
