"""A response under way, and those who follow its events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fwk_server._common.caller import Caller
from fwk_server._common.chat.dialect import Running
from fwk_server._common.records import Key
from fwk_server.openai_responses.reply import Writer
from fwk_server.openai_responses.request import ResponsesBody
from fwk_server.openai_responses.server_tools import ServerTools

_END = b"\n\n"
OPENED = b":\n\n"
"""A comment, which sends a stream on its way before there is an event to tell."""


@dataclass(slots=True)
class Job:
    """What is stored of a response at its end (``key`` None: nothing), and its events where they may be asked for.

    An event's place in ``events`` is its ``sequence_number``; None: they are not kept.
    """

    writer: Writer
    running: Running  # the newest round
    key: Key | None
    inputs: list[dict[str, Any]]
    context: list[dict[str, Any]]
    asked: ResponsesBody
    raw: Mapping[str, Any]
    caller: Caller
    tools: ServerTools
    approved: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # requests for approval
    events: list[bytes] | None = None
    task: asyncio.Task[None] | None = None
    has_ended: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def entry(self) -> dict[str, Any]:
        entry = {"response": self.writer.response, "input": self.inputs, "context": self.context}
        if self.events is not None:
            entry["events"] = [event.decode() for event in self.events]
        return entry

    def tell(self, lines: bytes) -> None:
        """More events: who follows gets them."""
        if self.events is not None and lines:
            self.events += [event + _END for event in lines.split(_END)[:-1]]
            self._wake()

    def end(self) -> None:
        """No event comes any more."""
        self.has_ended = True
        self._wake()

    async def follow(self, start: int) -> AsyncGenerator[bytes, None]:
        """The events from number ``start`` on, those to come as well."""
        assert self.events is not None
        place = start
        yield OPENED
        while True:
            changed = self._changed
            new = self.events[place:]
            if new:
                yield b"".join(new)
                place += len(new)
            elif self.has_ended:
                return
            else:
                await changed.wait()

    async def stop(self) -> None:
        """Stop it, and wait until the engine knows."""
        if self.task is not None:  # else it is about to begin, which its caller sees to
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        self.end()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
