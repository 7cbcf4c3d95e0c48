"""Plugins that only the tests install: an engine without a model, and pieces that fail when a request says so.

A request asks for a fault with ``"fault": "PLACE:K"``: the place misbehaves at its K-th turn with that request.
"""

from __future__ import annotations

from pydantic import BaseModel, Field

from fwk import (
    ExecutorSpec,
    LogitsProcessorSpec,
    ObserverSpec,
    Options,
    SamplerSpec,
    SchedulePolicySpec,
    hookimpl,
    option,
)

SECRET = "/srv/secret/weights.bin at 0x7f00deadbeef"
"""In the text of every exception raised here: no client may ever read it."""

PLACES = ("model", "sleep", "exit", "policy", "add", "apply", "remove", "memory", "detokenizer")


class FaultParams(BaseModel):
    """The request field that asks for a fault."""

    fault: str | None = Field(None, pattern=rf"^({'|'.join(PLACES)}):[0-9]{{1,4}}$")


class FakeOptions(Options):
    """Options of the engine without a model."""

    fake_step_ms: float = option(1.0, "Milliseconds a step takes.", ge=0, le=1000)
    fake_blocks: int = option(512, "Blocks of the fake KV cache.", ge=1, le=65536)


class FavourOptions(Options):
    """Options of the processor that knows one word."""

    favour_token: int | None = option(None, "The token that is said instead of all others.", ge=0)


class Fault(Exception):
    """What the faulty pieces raise."""

    def __init__(self) -> None:
        super().__init__(f"a fault of the tests: {SECRET}")


def asked(extra: dict[str, object], *places: str) -> tuple[str, int] | None:
    """The fault a request asks of one of ``places``, and at which turn."""
    place, _, turn = str(extra.get("fault") or "").partition(":")
    return (place, int(turn)) if place in places else None


@hookimpl
def executors() -> list[ExecutorSpec]:
    return [
        ExecutorSpec(name="fake", load="fwk_faults.executors:FakeExecutor", options=FakeOptions),
        ExecutorSpec(name="faulty", load="fwk_faults.executors:FaultyExecutor"),
    ]


@hookimpl
def schedule_policies() -> list[SchedulePolicySpec]:
    return [SchedulePolicySpec(name="faulty", load="fwk_faults.pieces:FaultyPolicy", rank=-10)]


@hookimpl
def samplers() -> list[SamplerSpec]:
    return [SamplerSpec(name="faulty", load="fwk_faults.pieces:FaultySampler", rank=-10)]


@hookimpl
def logits_processors() -> list[LogitsProcessorSpec]:
    load = "fwk_faults.pieces:FaultyProcessor"
    favour = LogitsProcessorSpec(
        name="favour", load="fwk_faults.pieces:Favour", options=FavourOptions, enabled_by=("favour_token",)
    )
    return [LogitsProcessorSpec(name="faulty", load=load, order=150, params=FaultParams), favour]


@hookimpl
def observers() -> list[ObserverSpec]:
    names = ("arrived", "tokens", "finished", "step", "detokenizer")
    faulty = [ObserverSpec(name=f"faulty_{name}", load=f"fwk_faults.observers:Faulty{name.title()}") for name in names]
    return [ObserverSpec(name="stats", load="fwk_faults.observers:Stats"), *faulty]
