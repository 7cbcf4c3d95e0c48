"""Features: capabilities with a part in the server, in the engine and in each worker, of which any two may be left out.

Core keeps lists of parts, which are empty in a run without features, and asks none of them which feature it is of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import msgspec

from fwk.config import Config
from fwk.errors import BlameSequence
from fwk.interfaces.attention import AttentionBackend, AttentionLayer
from fwk.interfaces.declaration import Declaration, Facts
from fwk.interfaces.device import Event, NoEvent
from fwk.interfaces.dialect import EmbedInput, Frontend, GenerateInput, OutputDelta, TextTools
from fwk.interfaces.executor import WorkerRecipe
from fwk.interfaces.grammar import Grammar
from fwk.interfaces.lifecycle import PluginLifecycle
from fwk.interfaces.loader import Checkpoint
from fwk.interfaces.model import Encoder, HiddenTap, Model, ModelContext, ModelSpec
from fwk.interfaces.native import NO_THREADS, NativeThreads
from fwk.interfaces.prefix_cache import PrefixMatch
from fwk.interfaces.sampling import LogitsProcessor
from fwk.interfaces.schedule import SchedulePolicy, SequenceView
from fwk.interfaces.served_weights import ServedWeights
from fwk.types import Batch, ForwardBatch, ModelConfig, NewSequence, Request, StepResult

if TYPE_CHECKING:
    import numpy as np
    import torch
    from fastapi import FastAPI
    from pydantic import BaseModel
    from torch import Tensor

    from fwk.interfaces.graphs import StepPieces

Ask = Callable[..., Awaitable[Any]]
"""``await ask(operation, *args)`` runs an operation of engine parts: ``ServerPartContext.ask``."""


class Plugins(Protocol):
    """Builds plugins of other families for a feature's part, as core does for itself."""

    def build(self, plugin: Any, context: Callable[..., object], **fields: Any) -> Any:
        """The object of the plugin that the run has chosen from family ``plugin``, of ``context(**fields, options=)``.

        Raises ``PluginLoadError``, or the plugin's own ``FwkError``.
        """
        ...

    def build_all(self, family: str, context: Callable[..., object], **fields: Any) -> Iterator[tuple[Any, Any]]:
        """Each plugin of a family of which all take part, best rank first: its declaration, and its object."""
        ...

    def items(self, family: str) -> Sequence[Any]:
        """What is installed of a family, best rank first: ``name``, ``version``, ``label`` and ``declaration`` each.

        ``build`` takes one in place of the family. In the server and its jobs.
        """
        ...

    def find(self, family: str, name: str) -> Any:
        """What is installed of a family under a name, one of ``items``. Raises ``PluginError``, which says what is."""
        ...

    def joining(self, item: Any, options: Mapping[str, object]) -> Callable[..., Any]:
        """``joining(item, options)(context, **fields)`` builds what takes part from now on, with options of its own.

        Raises ``ConfigError`` for options that do not fit, ``InvalidRequest`` for those that leave it off, and
        ``PluginError`` where it cannot join the run; in a server, of what runs in engines they alone know that.
        """
        ...

    def choose(self, family: str, name: str, context: Callable[..., object], **fields: Any) -> Any:
        """The object of a family's plugin of that name, or for ``auto`` of the best one that can serve the run.

        In a worker, which shows it at /server_info. Raises ``PluginError``.
        """
        ...


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


@dataclass(frozen=True, slots=True)
class PromptModel:
    """A model that is not to generate.

    - ``name``: as the user gave it.
    - ``spec``: the declaration of the plugin that computes it.
    - ``config``: the model's.
    - ``task``: what it is served for.
    - ``checkpoint``: where it is read from.
    """

    name: str
    spec: ModelSpec
    config: ModelConfig
    task: str
    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class PromptsServed:
    """What a feature makes of the prompts of a model that does not generate.

    vector_size: numbers of a vector, one of each prompt, or of each token (``has_token_vectors``). labels: of the
    numbers, where they are scores. needs_whole_prompts: a prompt's tokens must be computed together. max_length: the
    longest input that the model was made for. notes: a sentence for each choice that the user may not expect.
    settings: the feature's own, for its other parts.
    """

    vector_size: int = 0
    labels: tuple[str, ...] = ()
    has_token_vectors: bool = False
    needs_whole_prompts: bool = True
    max_length: int | None = None
    notes: tuple[str, ...] = ()
    settings: Any = None


@dataclass(frozen=True, slots=True)
class StatesKept:
    """How many states of recurrent layers are kept.

    max_rows: one of each of --max-running-requests, and those for the prefix cache; None: as many as the free memory
        holds.
    interval: generated tokens after which a sequence's is kept for the prefix cache again.
    """

    max_rows: int | None = None
    interval: int = 256


@dataclass(frozen=True, slots=True)
class FeatureRun:
    """A run whose plugins are settled, before its weights are read: what ``FeatureSpec.check_run`` goes by.

    model: as the user gave it. runner: ``generate`` or ``pool``. is_recurrent, has_encoder, media: of the model.
    chosen: what was settled, by family. features: the names of those that are on. one_server: what the user gave to
    turn on those that have ``FeatureSpec.one_server``, and why. items: as ``Plugins.items``.

    - ``config``: all options of the run.
    - ``prompts``: of a model that does not generate.
    - ``is_local``: whether all workers are on this machine.
    - ``model_config``: of the model; None: not known.
    - ``step_tokens``: that a step computes at most.
    - ``task``: what the model is served for.
    """

    config: Config
    model: str
    runner: str = "generate"
    is_recurrent: bool = False
    has_encoder: bool = False
    media: frozenset[str] = frozenset()
    chosen: Mapping[str, Declaration] = field(default_factory=dict[str, Declaration])
    features: frozenset[str] = frozenset()
    one_server: Mapping[str, str] = field(default_factory=dict[str, str])
    prompts: PromptsServed | None = None
    is_local: bool = True
    model_config: ModelConfig | None = None
    step_tokens: int = 0
    items: Callable[[str], Sequence[Any]] = lambda family: ()
    task: str = "generate"


@dataclass(frozen=True, kw_only=True)
class FeatureSpec(Declaration):
    """Declares a feature; every installed one takes part, one with ``enabled_by`` when it is turned on.

    A run that one with ``enabled_by`` refuses does not start; one without is left out of a run that it refuses.

    server, engine, worker: ``"package.module:Class"`` of a ``ServerPart``, an ``EnginePart``, a ``WorkerPart``, each
        imported only where it runs. One with a server part alone is a filter of requests, one with a worker part alone
        a probe. ``load`` is the first of them unless it is given. job: of a ``JobPart``, for what the server part has
        done in a process of its own. transfer: of a ``BlockTransfer`` for the engine's prefix cache, which is called
        with ``EnginePartContext.call``.
    wire: what they send one another.
    params: pydantic model of the request fields that the server part reads, in ``GenerateInput.sampling.extra``.
    methods: operations of the server part that ``fwk.LLM`` and ``fwk.AsyncLLM`` have as methods of these names.
    exclusive: operations of the server part that enter ``ServerPartContext.exclusive``, or run prompts by ``compute``:
        ``fwk.AsyncLLM`` runs one when the calls before it have ended, and has those after it wait.
    one_server: why it is refused where K/V go from one server to another; empty: it is not.
    fields: those among ``fwk.types.sampling.FEATURE_FIELDS`` that ask for the feature. A request that sets one is
    refused where no feature that is on has it.
    runners: what may run a model in which the worker part has a part (``ModelSpec.runner``). With ``pool``, no token is
        chosen in any step.
    needs_server: ``fwk.LLM`` refuses it.
    moves_blocks: why K/V leave the engine, or come from elsewhere, block by block, in words for a refusal; empty: they
        do not. Where they do, layers share one block table, the weights stay, and the model's files are hashed.
    changes_kv: False: tokens have the same K/V with it and without, so that its options are no part of what tells K/V
        apart, between runs and between servers.
    uses: families of which it uses a plugin, each with the option of its own that names it.
    server_options: those of its options that ``fwk.LLM`` refuses: a server alone reads them.
    """

    family: ClassVar[str] = "features"

    load: str = ""
    server: str = ""
    engine: str = ""
    worker: str = ""
    job: str = ""
    transfer: str = ""
    wire: Wire = Wire()
    params: type[BaseModel] | None = None
    methods: tuple[str, ...] = ()
    exclusive: tuple[str, ...] = ()
    one_server: str = ""
    fields: tuple[str, ...] = ()
    runners: tuple[str, ...] = ("generate",)
    needs_server: bool = False
    moves_blocks: str = ""
    changes_kv: bool = True
    uses: tuple[tuple[str, str], ...] = ()
    server_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        places = [place for place in (self.server, self.engine, self.worker, self.job, self.transfer) if place]
        for place in places:
            if ":" not in place:
                raise ValueError(f"FeatureSpec {self.name!r}: a part must be 'module:attribute', not {place!r}")
        if not places and not self.load:
            raise ValueError(f"FeatureSpec {self.name!r}: none of server, engine and worker names a part")
        object.__setattr__(self, "load", self.load or places[0])
        super().__post_init__()
        unknown = {name for _, name in self.uses} - set(self.options.model_fields if self.options is not None else ())
        if unknown:
            raise ValueError(f"FeatureSpec {self.name!r}: uses names no option of its own: {unknown}")

    def refusal(self, facts: Facts) -> str | None:
        why = super().refusal(facts)
        if why is None and self.worker and "pool" not in self.runners and facts.task not in ("", "generate"):
            why = f"has a part in steps of models that generate, and this one is served to {facts.task}"
        return why

    def takes(self, kinds: frozenset[str], options: Any) -> frozenset[str]:
        """Of the kinds of input besides text that a model takes, those that the feature brings."""
        return frozenset()

    def made_for(self, checkpoint: Checkpoint) -> str:
        """The task that a checkpoint says it was made for, as far as the feature serves it; empty: it does not say."""
        return ""

    def serves(self, model: PromptModel, options: Any) -> PromptsServed | None:
        """What it makes of the prompts of a model that does not generate; None: nothing. Raises ``ConfigError``."""
        return None

    def known(self, facts: Facts, options: Any) -> Facts:
        """What is known of the run before plugins are chosen, and what the options say of it."""
        return facts

    def offered(self, family: str, items: Sequence[Any], asked: str, options: Any) -> tuple[Sequence[Any], str]:
        """What a run chooses from of a family, and the name that it asks for, or ``auto``. Raises ``ConfigError``.

        items: what is installed, as of ``Plugins.items``; ``dataclasses.replace(item, declaration=)`` makes others.
        """
        return items, asked

    def states_kept(self, options: Any) -> StatesKept | None:
        """How many states of recurrent layers are kept, if it has a say in that."""
        return None

    def names_used(self, run: FeatureRun, options: Any) -> Iterable[tuple[str, str]]:
        """Plugins that its worker parts build in a run, by family and name: as ``uses`` says."""
        return [(family, getattr(options, option)) for family, option in self.uses]

    def check_run(self, run: FeatureRun, options: Any) -> None:
        """Raise ``ConfigError`` for a run that it cannot be in. Called before weights are read; options: its own."""

    def check_server(self, configs: Sequence[Config], options: Any) -> None:
        """Raise ``ConfigError`` for a server of these models that it cannot be in. Called before anything starts."""

    def one_engine(self, options: Any) -> tuple[str, str] | None:
        """What needs an engine that is the server's only one and is not stopped, and why; None: nothing."""
        return None


# The part in the server.


@dataclass(frozen=True, slots=True)
class JobPartContext:
    """What a part for jobs is built with.

    model_name, config, checkpoint, text: of the served model. inputs: kinds besides text that its prompts may have.

    - ``name``: the feature's.
    - ``plugins``: builds plugins of families that this process has.
    - ``options``: the plugin's own options, validated; None where it declares none.
    """

    name: str
    model_name: str
    config: ModelConfig
    checkpoint: Checkpoint
    text: TextTools
    inputs: frozenset[str]
    plugins: Plugins
    options: Any = None


class JobPart:
    """Does what may turn out endless or huge, in a process that forks for each job and can be killed.

    Built there once, with the first job; in ``fwk.LLM`` in the caller's process.
    """

    def __init__(self, context: JobPartContext) -> None:
        """May take long."""

    def run(self, body: bytes) -> bytes:
        """A job. Raises ``InvalidRequest`` to refuse it."""
        raise NotImplementedError


class Jobs:
    """Runs jobs of a feature's ``JobPart``."""

    def run(self, body: bytes, what: str, *, cpu_seconds: float, max_bytes: int) -> bytes:
        """Wait for one; call it off the event loop. what: it does, in words for errors.

        Raises ``InvalidRequest`` where it refuses, or takes more, ``NotServed`` and ``RequestFailed``.
        """
        raise NotImplementedError

    def warm_up(self) -> None:
        """Have the part built, without waiting for it."""


async def _nothing_runs(*, aborts: bool = False) -> None:
    """As in ``fwk.LLM``."""


@dataclass(frozen=True, slots=True)
class Exclusive:
    """A model's engines while they are changed, all of them or none: they run, and no other such change is under way.

    ask: as ``ServerPartContext.ask``, also after ``drain``.
    drain: ``await drain(aborts=)`` returns when the requests under way have ended, by themselves or aborted; those that
        come wait until this is left, and an engine that starts in another's place is told of things after that. Raises
        ``EngineDead`` where the engines are others than when this was entered.
    num_waiting: how many requests wait.
    """

    ask: Ask
    drain: Callable[..., Awaitable[None]] = _nothing_runs
    num_waiting: Callable[[], int] = lambda: 0


class RunningPlugins(ABC):
    """The plugins of a served model for which no weight, K/V or process is made, as they are used now.

    - ``config``: the model's options of now.
    - ``families``: of every family its ``noun``, its ``option`` and whether all of it take part (``takes_all``).
    - ``is_ready``: whether the engines have served.
    """

    config: Config
    families: Mapping[str, Any]
    is_ready: bool

    @abstractmethod
    def chosen(self) -> dict[str, str]:
        """Which plugin is used of each family of which one is."""

    @abstractmethod
    def active(self) -> list[str]:
        """Which take part, of families of which several do, by key (``observers.log``)."""

    @abstractmethod
    async def use(self, item: Any, config: Config, *, is_on: bool) -> None:
        """Use a plugin from now on, in place of the one that it replaces, or no more; ``config`` is that of then.

        item: of ``Plugins.find``. An observer, a dialect or a parser is exchanged; a policy or a logits processor is
        noted, which the engines have exchanged. Raises ``FwkError``, and ``ConfigError`` for routes that are another's;
        then nothing has changed.
        """


@dataclass(frozen=True, slots=True)
class ServerPartContext:
    """What a server part is built with, before the engines serve.

    ask: ``await ask(operation, *args)`` runs an operation of the engine part (of the worker parts, by rank, where the
        engine part has none of that name) in every engine that lives, between two of its steps; the answers by engine.
        Plain data both ways. Raises ``InvalidRequest`` with the first refusal, ``EngineDead`` when no engine lives.
    exclusive: ``async with exclusive() as engines`` has the engines to itself (``Exclusive``); in ``fwk.LLM`` it raises
        ``InvalidRequest`` while prompts are under way.
    note_weights: ``note_weights(model, load_format)``: the files of a checkpoint that is to be served, as they are now;
        may take long. None where there are none to note, as in ``fwk.LLM``.
    frontend: the served model as dialects see it; None in ``fwk.LLM``.
    has_admin: whether the server has an administrator, for whom ``admin_routes`` are.
    plugins: builds plugins of families that this process has.
    encoder: ``encoder(name, device, threads)``: of a worker for a process of the part's own, on the device of that
        number where workers need one each. ``load`` builds the feature's worker part and the served model without its
        layers, and ``call`` runs ``features.NAME.OPERATION`` of that part; None in ``fwk.LLM``.
    running: the plugins that may be others while it serves; None in ``fwk.LLM``.

    - ``name``: the feature's.
    - ``model_name``: what requests call the model.
    - ``text``: the model's tokenizer and templates.
    - ``options``: the plugin's own options, validated; None where it declares none.
    - ``lifecycle``: for calls of its own at setup, ready, drain and close, and for work in the background.
    - ``task``: what the model is served for.
    - ``prompts``: of one that does not generate.
    - ``prepare``: in ``fwk.LLM``, ``prepare(prompts, sampling, n, **fields)``: checked inputs, as of ``generate``.
    - ``compute``: in ``fwk.LLM``, ``compute(items, use_tqdm)`` checks and runs inputs: each a ``Completion``.
    - ``end_token_ids``: in ``fwk.LLM``, the tokens that end a text.
    - ``config``: the model's.
    - ``inputs``: kinds besides text that its prompts may have.
    - ``jobs``: runs the feature's ``JobPart``.
    """

    name: str
    model_name: str
    text: TextTools
    ask: Ask
    options: Any = None
    frontend: Frontend | None = None
    lifecycle: PluginLifecycle = field(default_factory=PluginLifecycle)
    has_admin: bool = True
    plugins: Plugins | None = None
    task: str = "generate"
    prompts: PromptsServed | None = None
    prepare: Callable[..., list[GenerateInput]] | None = None
    compute: Callable[..., Sequence[Any]] | None = None
    end_token_ids: tuple[int, ...] = ()
    config: ModelConfig | None = None
    inputs: frozenset[str] = frozenset()
    jobs: Jobs = field(default_factory=Jobs)
    exclusive: Callable[[], AbstractAsyncContextManager[Exclusive]] | None = None
    encoder: Callable[[str, int, int], WorkerRecipe] | None = None
    note_weights: Callable[[str, str | None], ServedWeights | None] = lambda model, load_format: None
    running: RunningPlugins | None = None


class RequestPart:
    """What a feature does for one request in the server. Every wait counts against ``ServerPart.max_seconds``.

    - ``namespace``: what separates the request's K/V from those of others, where the feature changes them; as of
      ``enter``.
    - ``others``: features of better rank that send the engine something with the request, or have a namespace; as of
      ``enter``.
    """

    namespace: str = ""

    others: tuple[str, ...] = ()

    async def check(self, item: Any) -> GenerateInput | EmbedInput:
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
    """A feature's part for one served model, on the server's event loop; ``fwk.LLM`` has it, too, without routes.

    - ``max_seconds``: what a request may wait for one call of a ``RequestPart``; then it is answered with 503.
    - ``public_paths``: of its routes those that no API key opens: it checks by itself who asks.
    """

    max_seconds: float = 30.0

    public_paths: ClassVar[tuple[str, ...]] = ()

    def __init__(self, context: ServerPartContext) -> None:
        self.context = context

    def routes(self, app: FastAPI) -> None:
        """Add routes for clients, as ``Dialect.routes`` does."""

    def admin_routes(self, app: FastAPI) -> None:
        """Add routes for the server's administrator, as ``Dialect.admin_routes`` does."""

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        """What ``fwk.LLM.call_feature`` can call, by name: what routes do in a server.

        Those that wait are coroutine functions.
        """
        return {}

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], dict[str, Any]]:
        """In ``fwk.LLM``: messages as chat templates read them, and the ``FEATURE_FIELDS`` that were taken out."""
        return messages, {}

    def complete(self, item: GenerateInput) -> GenerateInput:
        """In ``fwk.LLM``: an input before its length is checked, with its prompt changed. Raises ``InvalidRequest``."""
        return item

    def check(self, item: GenerateInput | EmbedInput) -> None:
        """A dialect has made an input, which may be one of several: raise ``InvalidRequest`` if it can only be wrong.

        Must be quick. Called before the engines serve, too, and for inputs that are never sent.
        """

    def open(self, item: GenerateInput | EmbedInput, caller: str) -> RequestPart | None:
        """What is done for a request; None, at no cost, for one that the feature has nothing to do with.

        caller: the name of the API key's holder, where it has one (``item.service.tenant`` stands for the key itself).
        """
        return None

    def answer(self, item: GenerateInput | EmbedInput) -> AsyncGenerator[list[OutputDelta], None] | None:
        """In a server: the whole reply to a checked input, made of those to others; None: it is made as any other.

        Closing it must abort what it asked for (``Frontend.generate``).
        """
        return None

    async def engines_ready(self) -> None:
        """The engines serve for the first time, and the server does after this: what they alone know can be asked for.

        Raises ``ConfigError`` to end it.
        """

    def trouble(self) -> str | None:
        """What of it cannot be used while the server continues to serve: /health says so. O(1)."""
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
    def num_prompt_tokens(self) -> int:
        """The first of ``token_ids``."""
        ...

    @property
    def num_matchable_tokens(self) -> int:
        """Its leading tokens whose K/V may come from the prefix cache."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether it has a slot; else it waits."""
        ...


@dataclass(eq=False, slots=True)
class ReservedBlocks:
    """Blocks for ``token_ids``, which follow the locked path ``node`` of the prefix cache.

    - ``block_ids``: in the order of the tokens.
    """

    node: Any
    block_ids: list[int]
    token_ids: list[int]


@dataclass(frozen=True, eq=False, slots=True)
class HeldBlocks:
    """Blocks at the beginning of a locked path ``node`` of the prefix cache.

    - ``block_ids``: in the order of the tokens.
    """

    node: Any
    block_ids: list[int]


class Blocks(Protocol):
    """The engine's KV cache, for parts that fill blocks before a sequence starts, or keep some after it has ended."""

    def match(self, sequence: FeatureSequence) -> PrefixMatch:
        """What the prefix cache has of a sequence's matchable tokens now."""
        ...

    def reserve(
        self, match: PrefixMatch, token_ids: Sequence[int], count: int, num_spare: int = 0
    ) -> ReservedBlocks | None:
        """Take ``count`` blocks for the tokens after what matched; None where ``num_spare`` more would not be left.

        token_ids: the sequence's. What matched stays where it is until ``settle``.
        """
        ...

    def settle(self, reserved: ReservedBlocks, *, has_arrived: bool) -> None:
        """Give reserved blocks to the prefix cache, if their K/V have arrived, else back. Nothing may write to them."""
        ...

    def hold(self, sequence: FeatureSequence, num_tokens: int) -> HeldBlocks | None:
        """Keep the full blocks of a running sequence's first tokens until ``let_go``, also after it has ended.

        Those that the prefix cache has, and with them all that it has of the sequence; None where it has none of them.
        """
        ...

    def let_go(self, held: HeldBlocks) -> None:
        """Keep them no longer than anything else in the cache."""
        ...

    def drop(self) -> None:
        """Have the prefix cache forget everything. No sequence may be running."""
        ...


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
    blocks: of the KV cache. num_running: how many sequences run now. moved_by: why K/V leave the engine, or come from
        elsewhere (``FeatureSpec.moves_blocks``). use_policy: ``use_policy(policy, name)`` ranks all who wait by another
    schedule policy, and tells it of all who run; raises ``EngineDead`` where it fails at that, and nothing has changed.

    - ``name``: the feature's.
    - ``options``: the plugin's own options, validated; None where it declares none.
    - ``plugins``: builds plugins of families that the engine has.
    """

    name: str
    call: Callable[..., list[Any]]
    wire: Wire = Wire()
    options: Any = None
    block_size: int = 16
    max_running: int = 256
    is_host: bool = True
    blocks: Blocks | None = None
    num_running: Callable[[], int] = lambda: 0
    moved_by: str = ""
    plugins: Plugins | None = None
    use_policy: Callable[[SchedulePolicy, str], None] | None = None


class EnginePart(Gate):
    """A feature's part in one engine, on its loop: a step has no time to spare, and what is raised ends the engine.

    Asked and told of the sequences alone that it ``concerns``. As it stands it passes what the server sent on to the
    workers, and of what they answer the newest to the server.

    - ``wants_steps``: whether ``step`` is asked; then no step of its sequences is planned in short.
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

    def cached(self, sequence: FeatureSequence, count: int) -> int:
        """It starts for the first time with the K/V of ``count`` tokens: how many the client is told were cached."""
        return count

    def planning(self) -> None:
        """A step is about to be planned, in which sequences that it concerns may have no part."""

    def limit(self, sequence: FeatureSequence, start: int, count: int) -> int:
        """How many of ``count`` prompt tokens from ``start`` on may be computed in one step; 0: wait for a larger one.

        A step may be as large as ``FeatureRun.step_tokens`` where no other sequence runs.
        """
        return count

    def restorable(self, sequence: FeatureSequence) -> bool:
        """Whether cache tiers may bring back tokens of it, so that its first step begins anywhere."""
        return True

    def new(self, sequence: FeatureSequence) -> msgspec.Struct | msgspec.Raw | None:
        """The sequence takes a slot: what the workers are told, of ``Wire.sequence``; None: they have no part in it."""
        return sequence.request.features.get(self.name)

    wants_steps: ClassVar[bool] = False

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
        """Whether the engine must continue to step though nothing is waiting or running."""
        return False

    def stats(self) -> msgspec.Struct | None:
        """Numbers of now, of ``Wire.stats``: counters, and gauges whose names begin with ``num_``. O(1)."""
        return None

    def trouble(self) -> str | None:
        """What goes otherwise than was asked while the engine continues to serve: /health says so. O(1)."""
        return None

    def prove(self, running: Collection[FeatureSequence], waiting: Collection[FeatureSequence]) -> None:
        """With ``--check-blocks``, after every step: raise ``AssertionError`` if its books do not balance."""

    def close(self) -> None:
        """The engine stops."""


# The part in each worker.


@dataclass(frozen=True, slots=True)
class ModelBuild:
    """A model that a worker is about to build.

    role: in this run; ``encoder``: the served one without layers (``ServerPartContext.encoder``). loader: the plugin
    that reads it. can_reread: whether its weights can be read again while it serves, as those in files can. path: of
    its files. threads: run native operators. identity: a hash of all that the weights depend on as this worker's layers
    will hold them, but for the versions of kernels and of layers' code; to be asked once the model is being built.
    read_since: names of the checkpoint's tensors that were read or skipped after so many others.
    """

    role: Literal["served", "draft", "head", "encoder"]
    loader: str = ""
    can_reread: bool = True
    path: Path = Path()
    threads: NativeThreads = NO_THREADS
    identity: Callable[[], str] = lambda: ""
    read_since: Callable[[int], Sequence[str]] = lambda count: ()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The served model, as a worker has built it.

    taps: by the number of layers before them, the places where its residual stream may be changed; empty for a model
    without. made: ``ModelContext.made``.

    - ``model``: as ``ModelSpec.load`` made it.
    """

    model: Model | Encoder
    taps: Mapping[int, HiddenTap]
    made: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class WorkerCache:
    """A worker's KV cache, as it was allocated.

    layers: with K/V of their own (``kv_cache``: [num_blocks, *block_shape], on the device; ``kv_spec``: their format).
    in_common: what a worker of this rank must have in common with another, perhaps on another machine, for blocks of
        the one to be blocks of the other, by the words that a message calls it by; it waits for the hash of the model's
        files (``FeatureSpec.moves_blocks`` starts it early).
    identity: 32 bytes that differ whenever the bytes of a block would mean something else: model, precision, layout,
        rank; ``identity(True)``: for blocks that another process may read, or a later one, with the hash of the files.

    - ``num_blocks``: of the cache.
    - ``block_size``: tokens in a block.
    """

    layers: Sequence[AttentionLayer]
    num_blocks: int
    block_size: int
    in_common: Callable[[], Mapping[str, str]]
    identity: Callable[[bool], bytes] = lambda outlives: b""


class ModelRebuild(Protocol):
    """Builds the served model anew, alongside the one that serves, and puts it in its place.

    It is built as at the start, by the same loader, quantizers and layers: its tokens are those of a fresh start, and
    what refuses a checkpoint there refuses it here.
    """

    def build(self, model: str, load_format: str | None) -> tuple[str, Any]:
        """A fingerprint of a checkpoint's files, and the model with its weights; load_format: None for the start's.

        Raises what opening and loading raise, memory that is not there among it: what serves is whole.
        """
        ...

    def serve(self, built: Any) -> None:
        """Use it from the next step on, with new K/V and states: nothing may run."""
        ...

    def trim(self) -> None:
        """Give back what a model took that is used no more."""
        ...


class Processors(Protocol):
    """The logits processors of a worker whose steps choose tokens."""

    def build(self, name: str, options: Mapping[str, object]) -> LogitsProcessor:
        """The processor of a name with these options, not yet in use. Raises ``FwkError``."""
        ...

    def use(self, name: str, processor: LogitsProcessor | None) -> None:
        """Use it for the sequences to come in place of the one of that name; None: use none. Others keep theirs."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerPartContext:
    """What a worker part is built with, before the model is.

    rank: of ``size`` workers that compute a model together. dtype: of the model. plugins: builds plugins of families
    that compute. send: brings an array to the device without waiting.
    to_host: begins a tensor's copy into the host's memory, which is whole when ``WorkerPart.results`` is called; on the
    host it is the tensor itself. grammar: that of the sequence in a slot, after its tokens that are sure, to be asked
    and not advanced; None without one, and where only the end may follow. rebuild: for operations, once the model
    serves. host_buffer: ``host_buffer(shape, dtype=)``, zeros in the host's memory, with which the device copies
    without waiting. event: a new mark in the order of the device's work. chosen: the plugins that were settled, by
    family. hash_files: begins to hash the model's files, which takes as long as reading them. processors: those of the
    worker, once the model serves; None where no step chooses a token.

    - ``name``: the feature's.
    - ``device``: the worker's.
    - ``wire``: the feature's.
    - ``options``: the plugin's own options, validated; None where it declares none.
    - ``is_host``: whether the device is the host itself.
    - ``num_slots``: most sequences at once.
    - ``vocab_size``: width of the logits.
    - ``hidden_size``: numbers in a hidden state.
    - ``num_layers``: of the model, all kinds counted.
    - ``step_tokens``: that a step computes at most.
    - ``prompts``: of a model that does not generate.
    - ``encode``: text to token ids, without special tokens.
    - ``inputs``: kinds besides text that prompts may have.
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
    step_tokens: int = 0
    dtype: torch.dtype | None = None
    plugins: Plugins | None = None
    grammar: Callable[[int], Grammar | None] = lambda slot: None
    prompts: PromptsServed | None = None
    encode: Callable[[str], list[int]] = lambda text: []
    inputs: frozenset[str] = frozenset()
    rebuild: ModelRebuild | None = None
    host_buffer: Callable[..., Tensor] | None = None
    event: Callable[[], Event] = NoEvent
    chosen: Mapping[str, Declaration] = field(default_factory=dict[str, Declaration])
    hash_files: Callable[[], None] = lambda: None
    processors: Callable[[], Processors | None] = lambda: None


class StepRunner(Protocol):
    """Runs a worker's steps: several may be launched before the first of them is collected, in their order."""

    def launch(self, batch: Batch) -> Any:
        """Begin a step. Returns what ``collect`` takes."""
        ...

    def collect(self, pending: Any) -> StepResult:
        """Wait for a step, also for one that was lost as it was launched."""
        ...

    def settle(self) -> None:
        """An operation is about to be run between two steps."""
        ...


class WorkerPart:
    """A feature's part in each worker. Has a part in the steps in which one of its sequences has one.

    - ``graphs``: ``eager``: such a step is computed by calling the model's layers, not replayed from a capture.
    - ``needs_lengths``: whether it goes by ``ForwardBatch.seq_lens_np``: then no step of its sequences is launched
      while drafts of them are being verified, of which some may count there that are rejected.
    """

    graphs: ClassVar[Literal["any", "eager"]] = "any"
    needs_lengths: ClassVar[bool] = False

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

    def around_captures(self) -> AbstractContextManager[None]:
        """Steps are captured within, on a device that captures each of some sizes by itself."""
        return nullcontext()

    def pieces(self, attention: AttentionBackend) -> StepPieces | None:
        """What replays steps with prompts on a device, cut where models call attention; None: it does not."""
        return None

    def model_context(self, context: ModelContext, build: ModelBuild) -> str:
        """A model is about to be built: complete what it is built with, and keep in ``context.made`` what is its own.

        Asked for the served model, again for one with other weights, which may be discarded, and for what drafts.
        Returns what tells apart the weights that workers then hold, for the cache of packed ones; empty: nothing is
        changed. Raises ``FwkError`` for a model that it cannot go with.
        """
        return ""

    def model_loaded(self, loaded: LoadedModel) -> None:
        """The model is there, the KV cache is not yet; and again, when it was built anew with other weights."""

    def cache_allocated(self, cache: WorkerCache) -> None:
        """The KV cache is there; nothing has run yet. Raises ``ConfigError`` for one that does not do."""

    def around(self, runner: StepRunner) -> StepRunner:
        """What runs the steps in the runner's place, and has it run them; the runner itself: nothing is to be done.

        Asked once the model is to serve; what it raises ends the engine.
        """
        return runner

    def rehearsal(self) -> Sequence[msgspec.Struct]:
        """The largest step is about to be run, to see what memory it takes: hold as much as its sequences can ask for.

        Returns what its sequences are told, in turn, of ``Wire.sequence``; none: it has no part in that step.
        """
        return ()

    def rehearsed(self) -> None:
        """That was it: forget what was held for it."""

    def warmed_up(self) -> None:
        """Steps from here on are of requests, until other weights are loaded."""

    def next_tokens(self, slot: int) -> Sequence[int]:
        """What comes next in the sequence of a slot, as far as that is known, after its tokens that are sure.

        Asked after a step that chose tokens of it. They are verified in one step, in place of a decoder's drafts that
        begin otherwise, and are drafts and no more: the model may pick others.
        """
        return ()

    def between_steps(self) -> None:
        """A step of any sequences was launched, and the next one was not; all ranks are at the same step.

        Engines wait for it. What it raises ends the engine.
        """

    def begin(self, new: NewSequence, asked: Any) -> None:
        """A sequence takes slot ``new.slot``. asked: of ``Wire.sequence``. Raises ``BlameSequence`` to refuse it."""

    def forget(self, slot: int) -> None:
        """It has left the slot."""

    def wants_hidden(self, slots: np.ndarray) -> bool:
        """Whether all layers must compute all tokens of a step of the sequences in ``slots``, [num_seqs] int64.

        Else the last one may leave out those that are not sampled after; ``computed`` then sees of some tokens alone.
        """
        return False

    def inputs(self, batch: Batch, forward: ForwardBatch) -> None:
        """Before the pass; ``forward.extras`` is the place for what layers are to find, ``inserted`` for rows."""

    def computed(self, batch: Batch, forward: ForwardBatch, hidden: Tensor, logits: Tensor | None) -> Any:
        """After the pass, on the device: never waits for it. Returns what ``results`` needs; None: nothing comes of it.

        hidden: what logits are made of, [num_tokens, hidden_size] if ``wants_hidden``, else of some tokens. logits:
        [num_rows, vocab_size], before any processor; None where no token is chosen. Both are gone when this returns.
        """
        return None

    def results(self, made: Any) -> Mapping[int, msgspec.Struct | BlameSequence]:
        """The step has come back. made: of ``computed``. By slot, what the engine is told, of ``Wire.result``.

        A ``BlameSequence`` fails the sequence, and no other.
        """
        return {}

    def close(self) -> None:
        """The worker stops: within a second."""
