"""Observers: told, never asked. Metrics, traces, logs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from fwk.interfaces.declaration import Declaration
from fwk.interfaces.lifecycle import Call, PluginLifecycle
from fwk.types import Batch, EngineStats, SamplingParams

if TYPE_CHECKING:
    import torch
    from fastapi import FastAPI


@dataclass(slots=True)
class RequestRecord:
    """The life of one request; times are monotonic seconds of the API process.

    ``operation`` and ``trace`` are those of ``GenerateInput``: what was asked, and the headers of the trace it is
    part of. ``caller`` is the name of the API key's holder, where it has one. ``headers`` are those of the HTTP request
    that the observer wants. ``sampling`` is the request's, as checked. ``prompt_token_ids`` and ``outputs``, the text
    of each sequence (when the request has finished), are there only for observers that want content, and must not be
    changed.

    - ``request_id``: ours, unique in the server's life.
    - ``label``: the client's own id of the request; empty without.
    - ``num_prompt_tokens``: of one sequence.
    - ``arrived``: when it was accepted.
    - ``first_token``: when the first tokens came; None: none yet.
    - ``last_token``: when the newest tokens came; None: none yet.
    - ``finished``: when it ended; None: it has not.
    - ``num_output_tokens``: so far, of all sequences.
    - ``cached_tokens``: of the prompt, whose K/V came from the prefix cache.
    - ``finish_reasons``: of the sequences that ended, in that order.
    - ``n``: sequences.
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
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    def copy(self) -> RequestRecord:
        """The record as it is now."""
        return RequestRecord(*_values(self))


_values = attrgetter(*(field.name for field in fields(RequestRecord)))


async def nothing() -> None:
    """There is nothing to wait for."""


async def no_workers(operation: str, *args: Any) -> list[list[Any]]:
    """There are no engines to ask."""
    return []


def _as_numbers(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


@dataclass(frozen=True, slots=True)
class ObserverContext:
    """What an observer is built with.

    settle: waits until the observer was told all that has happened, a second at most: for routes that show it.
    decode: the text of token ids, special tokens included; from any thread.
    shared: the same mapping for the plugin's observers of all models of a server, each of which has one of its own.
    call_workers: ``await call_workers(operation, *args)`` runs an operation of the observer's part in the workers
        (``ObserverSpec.worker``) in every worker, between two steps; the answers, by engine, then by rank. Raises
        ``InvalidRequest`` with the first refusal, ``EngineDead`` when no engine lives.
    has_admin: whether the server has an administrator, for whom ``admin_routes`` are.
    degraded: what /health says is not as was asked while the model serves; None: nothing.
    feature_stats: the class of ``EngineStats.features[name]`` for each feature that is on and counts something; a field
        may say what it is (``msgspec.Meta(description=...)``).

    - ``model_name``: what requests call the model.
    - ``options``: the plugin's own options, validated; None where it declares none.
    - ``lifecycle``: for calls of its own at setup, ready, drain and close, and for work in the background.
    """

    model_name: str
    options: Any = None
    lifecycle: PluginLifecycle = field(default_factory=PluginLifecycle)
    settle: Call = nothing
    decode: Callable[[Sequence[int]], str] = _as_numbers
    shared: dict[str, Any] = field(default_factory=dict[str, Any])
    call_workers: Callable[..., Awaitable[list[list[Any]]]] = no_workers
    has_admin: bool = True
    degraded: Callable[[], str | None] = lambda: None
    feature_stats: Mapping[str, type[msgspec.Struct]] = field(default_factory=dict[str, type[msgspec.Struct]])


class Observer:
    """Override what you want to hear; what is not overridden costs nothing.

    Calls come on a thread of the observer's own, in order, one at a time and within some hundredths of a second: a slow
    observer slows nobody. One that falls behind (20,000 events wait) misses events until it has caught up: tokens
    first, then requests, and of the engine's states all but the last. One that raises is notified no more. The log
    says so, and /server_info counts what was missed. Records are copies. ``routes`` are served on the event loop.

    - ``wants_content``: whether records hold prompts and outputs for it. Read for every request; users' words are
      nobody's by default.
    - ``wants_headers``: names, in lower case, of HTTP headers that records hold for it. Keys and cookies are held for
      none.
    """

    wants_content: bool = False

    wants_headers: frozenset[str] = frozenset()

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


@dataclass(frozen=True, slots=True)
class WorkerObserverContext:
    """What an observer's part in a worker is built with, before the model is loaded.

    is_host: whether the device is the host itself. rank: of ``size`` workers that compute a model together.
    replica: which of the server's engines they are of.

    - ``device``: the worker's.
    - ``options``: the plugin's own options, validated; None where it declares none.
    """

    device: torch.device
    is_host: bool = True
    rank: int = 0
    size: int = 1
    replica: int = 0
    options: Any = None


class WorkerObserver:
    """An observer's part in each worker: told of steps on the thread that computes them, so it must be quick.

    One that raises is told nothing more; the log says so.

    - ``wants_steps``: whether it is told of steps. Read once.
    """

    wants_steps: bool = False

    def __init__(self, context: WorkerObserverContext) -> None:
        self.context = context

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        """What ``ObserverContext.call_workers`` can call, by name: between two steps, with plain data.

        An ``FwkError`` refuses. Any other exception is logged, and refuses, too: nothing here ends an engine.
        """
        return {}

    def model_loaded(self, model: Any) -> None:
        """The served ``Model`` or ``Encoder`` is there, before its first step. What it raises stops the start."""

    def step_begins(self, batch: Batch) -> None:
        """A step is about to be computed, or on a device given to it."""

    def step_launched(self) -> None:
        """It was: on the host it is computed, on a device it may still run."""

    def close(self) -> None:
        """The worker stops: within a second."""


@dataclass(frozen=True, kw_only=True)
class ObserverSpec(Declaration):
    """Declares an observer; every installed one takes part, those with ``enabled_by`` when they are turned on.

    worker: ``"package.module:attribute"`` of a ``WorkerObserver`` to have in each worker, with the same options.
    reads_layers: that part sees what layers return, so steps are computed by calling them, and none is captured.
    """

    family: ClassVar[str] = "observers"

    worker: str | None = None
    reads_layers: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.worker is not None and ":" not in self.worker:
            raise ValueError(f"ObserverSpec {self.name!r}: worker must be 'module:attribute', not {self.worker!r}")
