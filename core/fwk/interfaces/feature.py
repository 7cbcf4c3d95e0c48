"""Features: capabilities with a part in the server, in the engine and in each worker, of which any two may be left out.

Core keeps lists of parts, which are empty in a run without features, and asks none of them which feature it is of.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import msgspec

from fwk.interfaces.declaration import Declaration, Facts
from fwk.interfaces.dialect import EmbedInput, Frontend, GenerateInput, OutputDelta, TextTools
from fwk.interfaces.lifecycle import PluginLifecycle
from fwk.interfaces.model import HiddenTap, Model
from fwk.interfaces.schedule import SequenceView
from fwk.types import Batch, ForwardBatch, NewSequence, Request

if TYPE_CHECKING:
    import numpy as np
    import torch
    from fastapi import FastAPI
    from pydantic import BaseModel
    from torch import Tensor

Ask = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Wire:
    """What a feature's parts send one another: classes derived from ``msgspec.Struct``; None: nothing.

    request: from the server to the engine, with a request. sequence: from the engine to the workers, as a sequence
    takes its slot. step: the same, with a step of a sequence. result: back, for a sequence of a step. event: from the
    engine to the server, with tokens of a sequence. stats: numbers of the engine's part.
    """

    request: type[msgspec.Struct] | None = None
    sequence: type[msgspec.Struct] | None = None
    step: type[msgspec.Struct] | None = None
    result: type[msgspec.Struct] | None = None
    event: type[msgspec.Struct] | None = None
    stats: type[msgspec.Struct] | None = None


@dataclass(frozen=True, kw_only=True)
class FeatureSpec(Declaration):
    """Declares a feature; every installed one takes part, one with ``enabled_by`` when it is turned on.

    A run that one with ``enabled_by`` refuses does not start; one without is left out of a run that it refuses.

    server, engine, worker: ``"package.module:Class"`` of a ``ServerPart``, an ``EnginePart``, a ``WorkerPart``, each
    imported only where it runs. One with a server part alone is a filter of requests, one with a worker part alone a
    probe. ``load`` is the first of them unless it is given.
    wire: what they send one another.
    params: pydantic model of the request fields that the server part reads, in ``GenerateInput.sampling.extra``.
    fields: those among ``fwk.types.sampling.FEATURE_FIELDS`` that ask for the feature. A request that sets one is
    refused where no feature that is on has it.
    """

    family: ClassVar[str] = "features"

    load: str = ""
    server: str = ""
    engine: str = ""
    worker: str = ""
    wire: Wire = Wire()
    params: type[BaseModel] | None = None
    fields: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        places = [place for place in (self.server, self.engine, self.worker) if place]
        for place in places:
            if ":" not in place:
                raise ValueError(f"FeatureSpec {self.name!r}: a part must be 'module:attribute', not {place!r}")
        if not places:
            raise ValueError(f"FeatureSpec {self.name!r}: none of server, engine and worker names a part")
        object.__setattr__(self, "load", self.load or places[0])
        super().__post_init__()

    def refusal(self, facts: Facts) -> str | None:
        if self.worker and facts.task not in ("", "generate"):
            return f"has a part in steps of models that generate, and this one is served to {facts.task}"
        return super().refusal(facts)


# The part in the server.


@dataclass(frozen=True, slots=True)
class ServerPartContext:
    """What a server part is built with, before the engines serve.

    ask: ``await ask(operation, *args)`` runs an operation of the engine part (of the worker parts, by rank, where the
        engine part has none of that name) in every engine that lives, between two of its steps; the answers by engine.
        Plain data both ways. Raises ``InvalidRequest`` with the first refusal, ``EngineDead`` when no engine lives.
    frontend: the served model as dialects see it; None in ``fwk.LLM``.
    has_admin: whether the server has an administrator, for whom ``admin_routes`` are.
    """

    name: str
    model_name: str
    text: TextTools
    ask: Ask
    options: Any = None
    frontend: Frontend | None = None
    lifecycle: PluginLifecycle = field(default_factory=PluginLifecycle)
    has_admin: bool = True


class RequestPart:
    """What a feature does for one request in the server. Every wait counts against ``ServerPart.max_seconds``."""

    namespace: str = ""
    """What separates the request's K/V from those of others, where the feature changes them; as of ``enter``."""

    async def check(self, item: Any) -> Any:
        """Complete or change the input, a ``GenerateInput`` or an ``EmbedInput``, before anything is queued.

        Raises ``InvalidRequest`` to refuse it, ``NotServed`` with another status.
        """
        return item

    async def enter(self, item: Any) -> msgspec.Struct | None:
        """What goes to the engine with the checked input, of ``Wire.request``; None: the engine has no part in it."""
        return None

    async def output(self, delta: OutputDelta, event: msgspec.Struct | None) -> OutputDelta:
        """Every piece of the reply on its way out, and what came with it from the engine part (``Wire.event``).

        May change and keep back: what is kept back must follow, at the latest with the delta that has a
        ``finish_reason``. To end a sequence, set one.
        """
        return delta

    def ended(self) -> None:
        """The request has ended, however it did. Called once; must be quick."""


class ServerPart:
    """A feature's part for one served model, on the server's event loop; ``fwk.LLM`` has it, too, without routes."""

    max_seconds: float = 30.0
    """What a request may wait for one call of a ``RequestPart``; then it is answered with 503."""

    def __init__(self, context: ServerPartContext) -> None:
        self.context = context

    def routes(self, app: FastAPI) -> None:
        """Add routes for clients, as ``Dialect.routes`` does."""

    def admin_routes(self, app: FastAPI) -> None:
        """Add routes for the server's administrator, as ``Dialect.admin_routes`` does."""

    def operations(self) -> Mapping[str, Callable[..., Awaitable[Any]]]:
        """What ``fwk.LLM.call_feature`` can call, by name: what routes do in a server."""
        return {}

    def check(self, item: GenerateInput | EmbedInput) -> None:
        """An input comes in, checked by core, before any of its call runs. Raises ``InvalidRequest``. Must be quick."""

    def open(self, item: GenerateInput | EmbedInput, caller: str) -> RequestPart | None:
        """What is done for a request; None, at no cost, for one that the feature has nothing to do with.

        caller: the name of the API key's holder, where it has one (``item.service.tenant`` stands for the key itself).
        """
        return None

    async def engine_begins(self, ask: Ask) -> None:
        """An engine has started in another's place, and serves after this: have it know what was told to that one.

        ask: as ``ServerPartContext.ask``, of this engine alone; returns its answer.
        """

    def close(self) -> None:
        """The server stops."""


# The part in the engine.


class FeatureSequence(SequenceView, Protocol):
    """What an engine part sees of a sequence. Read-only."""

    @property
    def key(self) -> tuple[str, int]:
        """The request's id and the sequence's number in it."""
        ...

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output so far; not to be changed."""
        ...

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def is_running(self) -> bool: ...


class Gate:
    """Asked before a waiting sequence starts. This one admits every sequence."""

    def poll(self) -> None:
        """The waiting are about to be looked at: find out what has become ready."""

    def lets_through(self, sequence: Any) -> bool:
        """Whether the sequence could start now. If not, see to it that it can soon."""
        return True

    @property
    def is_full(self) -> bool:
        """Whether nothing can be prepared for more sequences now."""
        return False

    def arrived(self, sequence: Any) -> None:
        """The sequence begins to wait: it is new, or was pre-empted."""

    def started(self, sequence: Any) -> None:
        """The sequence is in the plan of a step."""

    def ended(self, sequence: Any) -> None:
        """The sequence ended while it waited."""

    def wait(self) -> None:
        """There is nothing to run: wait a moment, if it is for this gate."""


@dataclass(frozen=True, slots=True)
class EnginePartContext:
    """What an engine part is built with, when the workers are loaded.

    call: ``call(operation, *args)`` runs an operation of the feature's worker parts on every worker, between two steps;
        the answers by rank. Raises ``FwkError`` with a refusal.
    wire: the feature's. block_size: tokens in a block of the KV cache. max_running: sequences that run at once.
    is_host: whether workers compute on the host itself.
    """

    name: str
    call: Callable[..., list[Any]]
    wire: Wire = Wire()
    options: Any = None
    block_size: int = 16
    max_running: int = 256
    is_host: bool = True


class EnginePart(Gate):
    """A feature's part in one engine, on its loop: a step has no time to spare, and what is raised ends the engine.

    Asked and told of the sequences alone that it ``concerns``. As it stands it passes what the server sent on to the
    workers, and of what they answer the newest to the server.
    """

    def __init__(self, context: EnginePartContext) -> None:
        self.context = context
        self._newest: dict[tuple[str, int], msgspec.Struct] = {}

    @property
    def name(self) -> str:
        """The feature's."""
        return self.context.name

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        """What ``ServerPartContext.ask`` can call, by name: between two steps, with plain data.

        An ``InvalidRequest`` refuses.
        """
        return {}

    def concerns(self, request: Request) -> bool:
        """Whether it has a part in a request; by default one with which the server part sent something."""
        return self.name in request.features

    def asked(self, request: Request) -> Any:
        """What the server part sent with a request, of ``Wire.request``; None if nothing."""
        raw = request.features.get(self.name)
        kind = self.context.wire.request
        return None if raw is None or kind is None else msgspec.msgpack.decode(raw, type=kind)

    def check(self, request: Request) -> None:
        """A request arrives. Raises ``InvalidRequest`` for what cannot be served; then nothing more is heard of it."""

    def left(self, request: Request) -> None:
        """None of its sequences waits or runs any more; or, after ``check``, something else has refused it."""

    def cache_ids(self, request: Request) -> list[int] | None:
        """Its prompt as prefix caches are to know it, as long as it is; None: by its tokens.

        For prompts whose K/V depend on more than their tokens. Ids that are no token's are negative, and of 32 bits.
        """
        return None

    def matchable(self, sequence: FeatureSequence, count: int) -> int:
        """How many of its first ``count`` tokens may come from the prefix cache."""
        return count

    def limit(self, sequence: FeatureSequence, start: int, count: int) -> int:
        """How many of ``count`` prompt tokens from ``start`` on may be computed in one step; at least 1."""
        return count

    def new(self, sequence: FeatureSequence) -> msgspec.Struct | msgspec.Raw | None:
        """The sequence takes a slot: what the workers are told, of ``Wire.sequence``; None: they have no part in it."""
        return sequence.request.features.get(self.name)

    wants_steps: ClassVar[bool] = False
    """Whether ``step`` is asked; then no step of its sequences is planned in short."""

    def step(self, sequence: FeatureSequence, start: int, count: int) -> msgspec.Struct | None:
        """A step computes ``count`` tokens of it from ``start`` on: what the workers are told, of ``Wire.step``."""
        return None

    def took(self, sequence: FeatureSequence, result: Any) -> None:
        """A step made this of the sequence, of ``Wire.result``; the step's tokens are in its text already."""
        self._newest[sequence.key] = result

    def event(self, sequence: FeatureSequence) -> msgspec.Struct | None:
        """Tokens of the sequence are sent: what goes with them, of ``Wire.event``."""
        return self._newest.pop(sequence.key, None)

    def preempted(self, sequence: FeatureSequence) -> None:
        """It waits again, and starts over later; its blocks are still there."""

    def finished(self, sequence: FeatureSequence) -> None:
        """It has ended, running or waiting; the blocks of one that runs are still there. Its last event comes after."""

    def forget(self, sequence: FeatureSequence) -> None:
        """Nothing more is heard of it."""
        self._newest.pop(sequence.key, None)

    @property
    def is_busy(self) -> bool:
        """Whether steps must go on though nothing is waiting or running."""
        return False

    def stats(self) -> msgspec.Struct | None:
        """Numbers of now, of ``Wire.stats``: counters, and gauges whose names begin with ``num_``. O(1)."""
        return None

    def prove(self, running: Collection[FeatureSequence], waiting: Collection[FeatureSequence]) -> None:
        """With ``--check-blocks``, after every step: raise ``AssertionError`` if its books do not balance."""

    def close(self) -> None:
        """The engine stops."""


# The part in each worker.


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The served model, as a worker has built it.

    taps: by the number of layers before them, the places where its residual stream may be changed; empty for a model
    without.
    """

    model: Model
    taps: Mapping[int, HiddenTap]


@dataclass(frozen=True, slots=True)
class WorkerPartContext:
    """What a worker part is built with, before the model is.

    rank: of ``size`` workers that compute a model together. send: brings an array to the device without waiting.
    to_host: begins a tensor's copy into the host's memory, which is whole when ``WorkerPart.results`` is called; on the
    host it is the tensor itself.
    """

    name: str
    device: torch.device
    send: Callable[[np.ndarray], Tensor]
    to_host: Callable[[Tensor], Tensor]
    wire: Wire = Wire()
    options: Any = None
    is_host: bool = True
    rank: int = 0
    size: int = 1
    num_slots: int = 256
    vocab_size: int = 0
    hidden_size: int = 0
    num_layers: int = 0


class WorkerPart:
    """A feature's part in each worker. Has a part in the steps in which one of its sequences has one."""

    graphs: ClassVar[Literal["any", "eager"]] = "any"
    """``eager``: such a step is computed by calling the model's layers, not replayed from a capture."""
    needs_lengths: ClassVar[bool] = False
    """Whether it goes by ``ForwardBatch.seq_lens_np``: then no step of its sequences is launched while drafts of them
    are being verified, of which some may count there that are rejected."""

    def __init__(self, context: WorkerPartContext) -> None:
        self.context = context

    def calls_layers(self, batch: Batch) -> bool:
        """Whether a step in which it has a part must be computed by calling the layers; by default, as ``graphs`` says.

        Asked before ``inputs``, of steps in which more changes than that each sequence has one more token.
        """
        return self.graphs == "eager"

    def kept_bytes(self, takes: frozenset[str]) -> int:
        """What it may keep in memory besides; asked before the model is built. takes: ``ModelContext.media``."""
        return 0

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        """What ``EnginePartContext.call`` can call, by name: between two steps, with plain data.

        An ``FwkError`` refuses. Any other exception is logged, and refuses, too.
        """
        return {}

    def model_loaded(self, loaded: LoadedModel) -> None:
        """The model is there, the KV cache is not yet; and again, when it was built anew with other weights."""

    def begin(self, new: NewSequence, asked: Any) -> None:
        """A sequence takes slot ``new.slot``. asked: of ``Wire.sequence``. Raises ``BlameSequence`` to refuse it."""

    def forget(self, slot: int) -> None:
        """It has left the slot."""

    def wants_hidden(self, slots: np.ndarray) -> bool:
        """Whether ``computed`` reads the hidden states of all tokens of a step of the sequences in ``slots``."""
        return False

    def inputs(self, batch: Batch, forward: ForwardBatch) -> None:
        """Before the pass; ``forward.extras`` is the place for what layers are to find, ``inserted`` for rows."""

    def computed(self, batch: Batch, forward: ForwardBatch, hidden: Tensor, logits: Tensor | None) -> Any:
        """After the pass, on the device: never waits for it. Returns what ``results`` needs; None: nothing comes of it.

        hidden: what logits are made of, [num_tokens, hidden_size] if ``wants_hidden``, else of some tokens. logits:
        [num_rows, vocab_size], before any processor; None where no token is chosen. Both are gone when this returns.
        """
        return None

    def results(self, made: Any) -> Mapping[int, msgspec.Struct]:
        """The step has come back. made: of ``computed``. By slot, what the engine is told, of ``Wire.result``."""
        return {}

    def close(self) -> None:
        """The worker stops: within a second."""
