"""Requests for the fake engine, and what became of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fwk.engine.core import Engine
from fwk.types import Batch, Request, SamplingParams, Service


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def ask(engine: Engine, name: str, prompt: list[int] | int = 4, max_tokens: int = 4, **fields: Any) -> None:
    """Queue a request; a number is the length of a prompt nobody else has."""
    ids = [hash((name, i)) % 97 for i in range(prompt)] if isinstance(prompt, int) else prompt
    service = Service(**{key: fields.pop(key) for key in list(fields) if key in Service.__struct_fields__})
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    request = Request(request_id=name, prompt_token_ids=ids, sampling=sampling, service=service, **fields)
    assert engine.add(request) == []


def finish(engine: Engine, each_step: Callable[[], None] | None = None, limit: int = 10_000) -> list[str]:
    """Step until idle; the requests in the order in which they ended."""
    ended: list[str] = []
    for _ in range(limit):
        if not engine.has_work:
            stats = engine.stats()
            assert (stats.num_running, stats.num_waiting, stats.num_held_blocks) == (0, 0, 0)
            engine.scheduler.check()
            return ended
        ended += step(engine)
        if each_step is not None:
            each_step()
    raise AssertionError("the engine does not come to an end")


def step(engine: Engine) -> list[str]:
    """One step; the requests that ended with it."""
    return [event.request_id for event in engine.step() if event.finish_reason is not None]


def batches(engine: Engine) -> list[Batch]:
    """What the fake worker has been given to compute."""
    return engine.executor.worker.batches  # type: ignore[attr-defined]
