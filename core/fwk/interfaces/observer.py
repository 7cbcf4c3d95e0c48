"""Observers: told, never asked. Metrics, traces, logs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from fwk.interfaces.declaration import Declaration
from fwk.types import EngineStats, SamplingParams

if TYPE_CHECKING:
    from fastapi import FastAPI


@dataclass(slots=True)
class RequestRecord:
    """The life of one request; times are monotonic seconds of the API process.

    ``operation`` and ``trace`` are those of ``GenerateInput``: what was asked, and the headers of the trace it is
    part of. ``sampling`` is the request's, as checked.
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


@dataclass(frozen=True, slots=True)
class ObserverContext:
    """What an observer is built with."""

    model_name: str
    options: Any = None


class Observer:
    """Override what you want to hear. Calls come on the event loop's thread: return at once, do not block."""

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

        ``record`` counts them already; its ``last_token`` is now.
        """

    def request_finished(self, record: RequestRecord) -> None:
        """A request ended, however it did."""

    def step_finished(self, stats: EngineStats) -> None:
        """The engine reported its state."""

    def close(self) -> None:
        """The server stops."""


@dataclass(frozen=True, kw_only=True)
class ObserverSpec(Declaration):
    """Declares an observer; every installed one takes part, those with ``enabled_by`` when they are turned on."""

    family: ClassVar[str] = "observers"
