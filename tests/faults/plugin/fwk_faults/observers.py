"""Observers: one that shows the engine's books and the application's routes, and four that raise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from fwk.interfaces.observer import Observer, ObserverContext, RequestRecord
from fwk.types import EngineStats
from fwk_faults import Fault

if TYPE_CHECKING:
    from fastapi import FastAPI


class Stats(Observer):
    """All of ``EngineStats`` at /faults/stats, all routes at /faults/routes."""

    def __init__(self, context: ObserverContext) -> None:
        super().__init__(context)
        self._stats = EngineStats()

    def step_finished(self, stats: EngineStats) -> None:
        self._stats = stats

    def routes(self, app: FastAPI) -> None:
        async def stats() -> dict[str, Any]:
            return msgspec.structs.asdict(self._stats)

        async def routes() -> list[Any]:
            return [
                [sorted(getattr(route, "methods", None) or ()), getattr(route, "path", None)] for route in app.routes
            ]

        app.add_api_route("/faults/stats", stats, methods=["GET"], include_in_schema=False)
        app.add_api_route("/faults/routes", routes, methods=["GET"], include_in_schema=False)


def _raise_for(record: RequestRecord, call: str) -> None:
    if record.label == f"observer:{call}":
        raise Fault


class FaultyArrived(Observer):
    def request_arrived(self, record: RequestRecord) -> None:
        _raise_for(record, "arrived")


class FaultyTokens(Observer):
    def tokens_received(self, record: RequestRecord, num_tokens: int, seconds: float) -> None:
        if record.num_output_tokens >= 3:
            _raise_for(record, "tokens")


class FaultyFinished(Observer):
    def request_finished(self, record: RequestRecord) -> None:
        _raise_for(record, "finished")


class FaultyStep(Observer):
    """Raises at the step after a request with its label."""

    def __init__(self, context: ObserverContext) -> None:
        super().__init__(context)
        self._is_armed = False

    def request_arrived(self, record: RequestRecord) -> None:
        self._is_armed = record.label == "observer:step"

    def step_finished(self, stats: EngineStats) -> None:
        if self._is_armed:
            raise Fault
