"""The part of a feature in a server, and what it is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from fwk.config import Config
from fwk.interfaces.dialect import EmbedInput, Frontend, GenerateInput, OutputDelta, TextTools
from fwk.interfaces.executor import WorkerRecipe
from fwk.interfaces.feature_common import Ask, Plugins, PromptsServed
from fwk.interfaces.lifecycle import PluginLifecycle
from fwk.interfaces.loader import Checkpoint
from fwk.interfaces.served_weights import ServedWeights
from fwk.types import ModelConfig

if TYPE_CHECKING:
    from fastapi import FastAPI


@dataclass(frozen=True, slots=True)
class JobPartContext:
    """What a part for jobs is built with.

    model_name, config, checkpoint, text: of the served model. inputs: kinds besides text that its prompts may have.

    - ``name``: the feature's.
    - ``plugins``: builds plugins of families that this process has.
    - ``options``: the plugin's own options, validated; None where it declares none.
    - ``eos_token_ids``: that end a text; may be empty.
    """

    name: str
    model_name: str
    config: ModelConfig
    checkpoint: Checkpoint
    text: TextTools
    inputs: frozenset[str]
    plugins: Plugins
    options: Any = None
    eos_token_ids: tuple[int, ...] = ()


class JobPart:
    """Does what may turn out endless or huge, in a process that forks for each job and can be killed.

    Built there once, with the first job; in ``fwk.LLM`` in the caller's process.

    - ``is_urgent``: whether a job has the priority of the server; else the steps of engines come before it.
    """

    is_urgent: ClassVar[bool] = False

    def __init__(self, context: JobPartContext) -> None:
        """May take long."""

    def prepare(self, body: bytes) -> None:
        """Before a job's fork, and for a warm-up: what is built here is there for all later jobs. May take long."""

    def run(self, body: bytes) -> bytes:
        """A job. Raises ``InvalidRequest`` to refuse it."""
        raise NotImplementedError


class Jobs:
    """Runs jobs of a feature's ``JobPart``."""

    def run(self, body: bytes, what: str, *, cpu_seconds: float, max_bytes: int, is_bounded: bool = True) -> bytes:
        """Wait for one; call it off the event loop. what: it does, in words for errors.

        is_bounded: whether it is refused where many of the feature's wait. Raises ``InvalidRequest`` where it refuses,
        or takes more, ``NotServed`` and ``RequestFailed``.
        """
        raise NotImplementedError

    def warm_up(self, body: bytes = b"") -> None:
        """Have the part built and ``prepare`` such a job, at a low priority, without waiting for it."""

    def waiting(self) -> AbstractContextManager[None]:
        """Within, this thread waits for what another request's has a job do, and takes no turn from it."""
        return nullcontext()


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
        engine part has none of that name) in every engine that lives, between two of its steps: a list, an answer each.
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
        ``finish_reason``. To end a sequence, set one; ``stop_reason`` may say what ended it.

        What the feature tells of a piece goes into ``delta.reply`` under its name, alongside that of others. Choices of
        OpenAI's chats and completions and SGLang's meta_info have it as ``features``, as ``fwk.LLM``'s completions do.
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

    def first_pause(self) -> None:
        """The engines serve, and no request is under way, or for ten seconds one always was: prepare for the first.

        In a server, once, off the event loop: may take long.
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
