"""What every observer must do."""

from __future__ import annotations

import importlib
import time
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.routing import Route

from fwk.errors import FwkError
from fwk.interfaces.observer import Observer, ObserverContext, ObserverSpec, RequestRecord, WorkerObserverContext
from fwk.plugins import Registered
from fwk.types import Batch, EngineStats, SamplingParams
from fwk_kit.testing.base import PluginSuite

SLOW = 2e-3
"""Seconds a call may take on average: it holds up every request of the server."""


class ObserverSuite(PluginSuite):
    """Every life a request can have, told in full, and told quickly."""

    family = "observers"
    interface = Observer

    def observer(self, item: Registered) -> Observer:
        """One for a server."""
        return self.make(item, ObserverContext("tiny", self.given(item)))

    def exercise(self, item: Registered) -> None:
        self.test_hears_every_kind_of_life(item)

    def lives(self, observer: Observer, count: int = 20) -> None:
        """Requests that are answered, cut off at once, answered n times, and never told of their end."""
        for i in range(count):
            record = RequestRecord(f"r{i}", "label", 5 + i, time.monotonic(), sampling=SamplingParams(), n=1 + i % 3)
            observer.request_arrived(record)
            for step in range(i % 5):
                record.first_token = record.first_token or time.monotonic()
                record.last_token = time.monotonic()
                record.num_output_tokens += 2
                observer.tokens_received(record, 2, 0.01 * step)
            record.cached_tokens = i
            observer.step_finished(EngineStats())
            if i % 7:
                record.finished = time.monotonic()
                record.finish_reasons = ("stop",) * (i % 3)
                observer.request_finished(record)

    def test_hears_every_kind_of_life(self, item: Registered) -> None:
        observer = self.observer(item)
        self.lives(observer)
        observer.close()

    def test_returns_at_once(self, item: Registered) -> None:
        observer = self.observer(item)
        self.lives(observer)
        best = min(self._seconds(observer) for _ in range(5))
        observer.close()
        assert best < SLOW, f"{best * 1000:.1f} ms a call: the event loop waits for it"

    def _seconds(self, observer: Observer) -> float:
        started = time.perf_counter()
        self.lives(observer, 20)
        return (time.perf_counter() - started) / 100

    def test_routes_are_its_own(self, item: Registered) -> None:
        app = FastAPI()
        before = {route.path for route in app.router.routes if isinstance(route, Route)}
        observer = self.observer(item)
        observer.routes(app)
        added = [route.path for route in app.router.routes if isinstance(route, Route) and route.path not in before]
        observer.close()
        assert not set(added) & {"/health", "/ready", "/server_info"}

    def test_two_servers_in_one_process(self, item: Registered) -> None:
        one: Any = self.observer(item)
        two: Any = self.observer(item)
        self.lives(one)
        self.lives(two)
        one.close()
        self.lives(two)
        two.close()

    def test_its_part_in_a_worker_follows_steps(self, item: Registered) -> None:
        """On the host; a part that is for devices refuses with a sentence."""
        assert isinstance(item.declaration, ObserverSpec)
        if item.declaration.worker is None:
            pytest.skip(f"{item.name} has no part in the workers: it declares no worker")
        import torch  # noqa: PLC0415 - only these need it

        module, _, name = item.declaration.worker.partition(":")
        make: Any = getattr(importlib.import_module(module), name)
        try:
            part = make(WorkerObserverContext(torch.device("cpu"), options=self.given(item)))
        except FwkError as refusal:
            pytest.skip(f"{item.name} refuses: {refusal}")
        assert all(callable(operation) for operation in part.operations().values())
        for number in range(3):
            part.step_begins(Batch(number, [], [], []))
            part.step_launched()
        part.close()
