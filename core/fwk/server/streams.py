"""What a request waits for: the events of its sequences."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fwk.errors import EngineDead, NotServed
from fwk.interfaces.dialect import OutputDelta
from fwk.text import SequenceText
from fwk.types import TokenEvent


class EventStream:
    """Events of one request, from the socket's callback to the request's own task.

    ``pause`` is called with True when more than ``max_len`` wait to be taken, and with False when all were.
    """

    def __init__(self, max_len: int, pause: Callable[[bool], None]) -> None:
        self._max_len = max_len
        self._pause = pause
        self._is_paused = False
        self._items: list[TokenEvent] = []
        self._error: EngineDead | NotServed | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, news: list[TokenEvent] | EngineDead | NotServed) -> None:
        if isinstance(news, EngineDead | NotServed):
            self._error = self._error or news
        else:
            self._items.extend(news)
            if len(self._items) > self._max_len and not self._is_paused:
                self._is_paused = True
                self._pause(True)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[TokenEvent]:
        """Everything that has come since; waits for something. Once all was taken, raises what ended it."""
        while not self._items:
            if isinstance(self._error, EngineDead):
                raise EngineDead(str(self._error))  # the one that was told is everybody's
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        if self._is_paused:
            self._is_paused = False
            self._pause(False)
        return items


class SequenceStream:
    """One sequence of a request on its way back to the client."""

    __slots__ = ("index", "is_done", "last_time", "num_tokens", "text")

    def __init__(self, index: int, text: SequenceText, now: float) -> None:
        self.index = index
        self.text = text
        self.is_done = False
        self.last_time = now
        self.num_tokens = 0

    def delta(self, event: TokenEvent) -> OutputDelta:
        """What the client learns from an event."""
        text, count = self.text.feed(event)
        self.num_tokens += count
        stop = self.text.stop_string
        return OutputDelta(
            index=self.index,
            text=text,
            token_ids=event.token_ids[:count],
            finish_reason="stop" if stop is not None else event.finish_reason,
            stop_reason=stop if stop is not None else event.stop_token_id,
            logprobs=event.logprobs[:count] if event.logprobs is not None else None,
            cached_tokens=event.cached_tokens,
            num_output_tokens=self.num_tokens,
            draft_tokens=event.draft_tokens,
            accepted_draft_tokens=event.accepted_draft_tokens,
            error=event.error,
            is_refusal=event.is_refusal,
            num_cut=len(event.token_ids) - count,
            features=event.features,
        )
