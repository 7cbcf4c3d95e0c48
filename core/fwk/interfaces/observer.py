"""Observers: told, never asked. Metrics, traces, logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from fwk.interfaces.declaration import Declaration
from fwk.interfaces.lifecycle import Call, PluginLifecycle
from fwk.types import EngineStats, SamplingParams

if TYPE_CHECKING:
    from fastapi import FastAPI


@dataclass(slots=True)
class RequestRecord:
    """The life of one request; times are monotonic seconds of the API process.

    ``operation`` and ``trace`` are those of ``GenerateInput``: what was asked, and the headers of the trace it is
    part of. ``caller`` is the name of the API key's holder, where it has one. ``sampling`` is the request's, as
    checked. ``prompt_token_ids`` and ``outputs``, the text of each sequence (when the request has finished), are there
    only for observers that want content, and must not be changed.
    """

    request_id: str
    label: str
    num_prompt_tokens: int
    arrived: float
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    num_output_tokens: int = 0
    cached_tokens: int = 0
    finish_reasons: tuple[str, ...] = ()
    operation: str = "text_completion"
    trace: Mapping[str, str] = field(default_factory=dict[str, str])
    sampling: SamplingParams | None = None
    n: int = 1
    prompt_token_ids: Sequence[int] | None = None
    outputs: tuple[str, ...] | None = None
    caller: str = ""

    def copy(self) -> RequestRecord:
        """The record as it is now."""
        return RequestRecord(*_values(self))


_values = attrgetter(*(field.name for field in fields(RequestRecord)))


async def nothing() -> None:
    """There is nothing to wait for."""


def _as_numbers(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


@dataclass(frozen=True, slots=True)
class ObserverContext:
    """What an observer is built with.

    settle: waits until the observer was told all that has happened, a second at most: for routes that show it.
    decode: the text of token ids, special tokens included; from any thread.
    shared: the same mapping for the plugin's observers of all models of a server, each of which has one of its own.
    """

    model_name: str
    options: Any = None
    lifecycle: PluginLifecycle = field(default_factory=PluginLifecycle)
    settle: Call = nothing
    decode: Callable[[Sequence[int]], str] = _as_numbers
    shared: dict[str, Any] = field(default_factory=dict[str, Any])


class Observer:
    """Override what you want to hear; what is not overridden costs nothing.

    Calls come on a thread of the observer's own, in order, one at a time and within some hundredths of a second: a slow
    observer slows nobody. One that falls behind (20,000 events wait) misses events until it has caught up: tokens
    first, then requests, and of the engine's states all but the last. One that raises is notified no more. The log
    says so, and /server_info counts what was missed. Records are copies. ``routes`` are served on the event loop.
    """

    wants_content: bool = False
    """Whether records hold prompts and outputs for it. Read for every request; users' words are nobody's by default."""

    def __init__(self, context: ObserverContext) -> None:
        self.context = context

    def routes(self, app: FastAPI) -> None:
        """Add routes, such as /metrics."""

    def admin_routes(self, app: FastAPI) -> None:
        """Add routes for the server's administrator, as ``Dialect.admin_routes`` does."""

    def request_arrived(self, record: RequestRecord) -> None:
        """A request was accepted."""

    def tokens_received(self, record: RequestRecord, num_tokens: int, seconds: float) -> None:
        """``num_tokens`` came ``seconds`` after the sequence's previous ones (after arrival for the first).

        ``record`` counts them already; its ``last_token`` is when they came.
        """

    def request_finished(self, record: RequestRecord) -> None:
        """A request ended, however it did."""

    def step_finished(self, stats: EngineStats) -> None:
        """The engine reported its state."""

    def engine_died(self, reason: str) -> None:
        """An engine that served has died; told before the ends of the requests it had."""

    def close(self) -> None:
        """There is nothing more to tell: the server stops, or the observer is switched off. Has five seconds."""


@dataclass(frozen=True, kw_only=True)
class ObserverSpec(Declaration):
    """Declares an observer; every installed one takes part, those with ``enabled_by`` when they are turned on."""

    family: ClassVar[str] = "observers"
