"""Counts requests and tokens: GET /mine/stats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.interfaces.observer import Observer, ObserverContext, RequestRecord

if TYPE_CHECKING:
    from fastapi import FastAPI


class MineObserver(Observer):
    """Adds up; a call costs less than a microsecond."""

    def __init__(self, context: ObserverContext) -> None:
        super().__init__(context)
        self.counts = {"requests": 0, "tokens": 0, "finished": 0}

    def routes(self, app: FastAPI) -> None:
        async def stats() -> dict[str, int]:
            await self.context.settle()  # observers are told a moment later, on a thread of their own
            return self.counts

        app.add_api_route("/mine/stats", stats, methods=["GET"])

    def request_arrived(self, record: RequestRecord) -> None:
        self.counts["requests"] += 1

    def tokens_received(self, record: RequestRecord, num_tokens: int, seconds: float) -> None:
        self.counts["tokens"] += num_tokens

    def request_finished(self, record: RequestRecord) -> None:
        self.counts["finished"] += 1
