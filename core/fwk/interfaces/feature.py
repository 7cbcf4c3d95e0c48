"""Features: capabilities with a part in the server, in the engine and in each worker, of which any two may be left out.

Core keeps lists of parts, which are empty in a run without features, and asks none of them which feature it is of.

Here is the declaration; each part has a module of its own (``feature_server``, ``feature_engine``, ``feature_worker``),
and so has what they have in common (``feature_common``). All of it is to be imported from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fwk.config import Config
from fwk.interfaces.declaration import Declaration, Facts
from fwk.interfaces.feature_common import Ask as Ask
from fwk.interfaces.feature_common import FeatureRun as FeatureRun
from fwk.interfaces.feature_common import Plugins as Plugins
from fwk.interfaces.feature_common import PromptModel as PromptModel
from fwk.interfaces.feature_common import PromptsServed as PromptsServed
from fwk.interfaces.feature_common import StatesKept as StatesKept
from fwk.interfaces.feature_common import StepPace as StepPace
from fwk.interfaces.feature_common import StepPlanning as StepPlanning
from fwk.interfaces.feature_common import Wire as Wire
from fwk.interfaces.feature_engine import Blocks as Blocks
from fwk.interfaces.feature_engine import EnginePart as EnginePart
from fwk.interfaces.feature_engine import EnginePartContext as EnginePartContext
from fwk.interfaces.feature_engine import FeatureSequence as FeatureSequence
from fwk.interfaces.feature_engine import Gate as Gate
from fwk.interfaces.feature_engine import HeldBlocks as HeldBlocks
from fwk.interfaces.feature_engine import ReservedBlocks as ReservedBlocks
from fwk.interfaces.feature_server import Exclusive as Exclusive
from fwk.interfaces.feature_server import JobPart as JobPart
from fwk.interfaces.feature_server import JobPartContext as JobPartContext
from fwk.interfaces.feature_server import Jobs as Jobs
from fwk.interfaces.feature_server import RequestPart as RequestPart
from fwk.interfaces.feature_server import RunningPlugins as RunningPlugins
from fwk.interfaces.feature_server import ServerPart as ServerPart
from fwk.interfaces.feature_server import ServerPartContext as ServerPartContext
from fwk.interfaces.feature_worker import LoadedModel as LoadedModel
from fwk.interfaces.feature_worker import ModelBuild as ModelBuild
from fwk.interfaces.feature_worker import ModelRebuild as ModelRebuild
from fwk.interfaces.feature_worker import Processors as Processors
from fwk.interfaces.feature_worker import StepRunner as StepRunner
from fwk.interfaces.feature_worker import WorkerCache as WorkerCache
from fwk.interfaces.feature_worker import WorkerPart as WorkerPart
from fwk.interfaces.feature_worker import WorkerPartContext as WorkerPartContext
from fwk.interfaces.loader import Checkpoint

if TYPE_CHECKING:
    from pydantic import BaseModel


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
    params: pydantic model of the request fields that the server part reads, in ``GenerateInput.sampling.extra``; where
        the feature is off, a request that sets one is refused by what switches it on.
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

    def step_planning(self, options: Any) -> StepPlanning | None:
        """How steps are planned, if it has a say in that."""
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
