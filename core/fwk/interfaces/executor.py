"""How the engine reaches its workers."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from fwk.config import Config
from fwk.interfaces.declaration import Declaration, Facts
from fwk.interfaces.parallel import ParallelGroup
from fwk.types import Batch, StepResult


class Worker(ABC):
    """Owns one device: model, KV cache, sampler. Core supplies it; executors place it."""

    @abstractmethod
    def load(self) -> WorkerInfo:
        """Load weights and allocate the KV cache."""

    @abstractmethod
    def execute(self, batch: Batch) -> StepResult:
        """Run one step, and wait for it. An exception leaves the worker unusable."""

    def launch(self, batch: Batch) -> Any:
        """Begin a step; returns what ``collect`` wants. An exception leaves the worker unusable.

        On a CPU the step is done when this returns. On a device it waits for nothing.
        """
        return self.execute(batch)

    def collect(self, pending: Any) -> StepResult:
        """Wait for a launched step; in the order of ``launch``. An exception leaves the worker unusable."""
        return pending

    @abstractmethod
    def call(self, name: str, *args: Any) -> Any:
        """Run an out-of-step operation (weight update, profile, ...) by its registered name.

        Arguments and result are plain data (numbers, strings, bytes, lists, dicts), for they may travel. An
        ``FwkError`` refuses the operation and harms nothing; any other exception leaves the worker unusable.
        """

    def close(self) -> None:
        """Finish or give up what is under way outside of steps, within a second. The worker is not used again."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What the engine learns once the workers are loaded.

    - ``num_blocks``: of the KV cache, without those the worker keeps for itself.
    - ``vocab_size``: width of the logits.
    - ``chosen``: name of the plugin in use, by family.
    - ``reasons``: a sentence for each plugin that was passed over.
    - ``num_window_groups``: groups of layers with a block table of their own, in addition to the first
    - ``window``: tokens that layers of those groups see
    - ``num_state_places``: states that can be kept for the prefix cache; None: no recurrent layers
    - ``max_running``: sequences whose states have room at once, where that is fewer than asked for
    - ``depth``: steps it gains from having been launched before the first of them is collected
    - ``num_lookahead``: most drafts for one sequence: tokens past the newest one that need blocks
    - ``memory``: Bytes of the device by what has them: total, others, weights (and buffers), step (the largest),
      graphs, kv_cache; empty where they are the host's.
    """

    num_blocks: int
    vocab_size: int
    chosen: dict[str, str]
    reasons: tuple[str, ...] = ()
    num_window_groups: int = 0
    window: int = 0
    num_state_places: int | None = None
    max_running: int | None = None
    depth: int = 1
    num_lookahead: int = 0
    memory: dict[str, int] = field(default_factory=dict[str, int])


class WorkerRecipe(msgspec.Struct, frozen=True):
    """How to make a worker in another process: plain data, to be sent there as msgpack or JSON.

    maker: ``"package.module:function"``, called there with ``config`` and the group of ranks.
    """

    maker: str
    config: dict[str, Any]

    def make(self, group: ParallelGroup) -> Worker:
        """The worker of ``group.rank``; torch is imported here."""
        module, _, name = self.maker.partition(":")
        return getattr(importlib.import_module(module), name)(self.config, group)


@dataclass(frozen=True, slots=True)
class ExecutorContext:
    """What an executor is built with: two ways to a worker, one for each of ``tp_size * pp_size`` ranks.

    ``make_worker(group)`` makes one in the calling process; ``recipe`` is for other processes.

    - ``tp_size``: ranks of a tensor-parallel group.
    - ``pp_size``: stages, each with such a group. Rank r is of stage r // tp_size; the last stage's results count.
    - ``options``: the plugin's own options, validated; None where it declares none.
    - ``step_timeout``: seconds after which a step that has not come back counts as hung; a worker's loss is then the
      engine's end.
    - ``common``: what every machine of a run must have in common, by the words that a message calls it by
      (``NodeContext``).
    """

    make_worker: Callable[[ParallelGroup], Worker]
    recipe: WorkerRecipe
    tp_size: int = 1
    options: Any = None
    step_timeout: float = 300.0
    common: Callable[[], Mapping[str, str]] = dict[str, str]
    pp_size: int = 1


class Executor(ABC):
    """Runs batches on all workers, in the order of ``launch``.

    - ``depth``: steps in flight the executor gains from: 2 hides the scheduling of step N+1 behind step N. With
      ``--disable-overlap-schedule`` the engine keeps to 1.
    - ``launches_ahead``: whether a worker is given the next step before the one before is collected. Where each step is
      executed in one go, a worker cannot draft for the step after the next.
    """

    depth: int = 1

    launches_ahead: bool = False

    def __init__(self, context: ExecutorContext) -> None:
        self.context = context

    @abstractmethod
    def load(self) -> WorkerInfo:
        """Start the workers and load the model. Blocks until they are ready."""

    @abstractmethod
    def launch(self, batch: Batch) -> Any:
        """Start a step; returns a handle for ``collect``. Must not wait for the result when ``depth`` > 1."""

    @abstractmethod
    def collect(self, pending: Any) -> StepResult:
        """Wait for a launched step. Raises when the step failed as a whole: the engine is then dead."""

    @abstractmethod
    def call(self, name: str, *args: Any) -> list[Any]:
        """Run an out-of-step operation on every worker: after each step launched so far, before any launched later.

        Returns the answers in the order of ranks.
        """

    def check(self) -> None:
        """Raise ``EngineDead`` when a worker is gone. Called about twice a second while no step is in flight."""

    @abstractmethod
    def close(self) -> None:
        """Stop the workers, with ``Worker.close`` for those that still answer. Idempotent; never hangs."""


@dataclass(frozen=True, slots=True)
class NodeContext:
    """What a ``WorkerNode`` is built with; ``common`` and the rest as in ``ExecutorContext``.

    - ``recipe``: of the workers.
    - ``tp_size``: ranks of the whole engine, in all stages.
    - ``options``: the executor's own, validated.
    - ``say``: writes a sentence to the log, at level info.
    """

    recipe: WorkerRecipe
    tp_size: int
    options: Any
    common: Callable[[], Mapping[str, str]]
    say: Callable[[str], None]


class WorkerNode(ABC):
    """The workers on this machine of an engine on another one."""

    def __init__(self, context: NodeContext) -> None:
        self.context = context

    @abstractmethod
    def run(self) -> int:
        """Join the engine, and place workers for it until it ends; returns the exit code of the process.

        Raises ``FwkError`` where it cannot be joined, or where it ends in another way than by being stopped.
        """


@dataclass(frozen=True, kw_only=True)
class ExecutorSpec(Declaration):
    """Declares an executor.

    max_tp_size: workers it can run as one tensor-parallel group: 1 unless it says more; None: any number.
    has_stages: whether it runs several such groups, each with some of the model's layers.
    local_options: options of its own that may differ between the machines of a run.
    """

    family: ClassVar[str] = "executors"

    max_tp_size: int | None = 1
    has_stages: bool = False
    local_options: frozenset[str] = frozenset()

    def check_server(self, configs: Sequence[Config], options: Any) -> None:
        """Raise ``ConfigError`` where its options cannot be had in such a server; called before anything is loaded.

        configs: of each model, the first one's for the server. options: its own, validated.
        """

    def one_engine(self, options: Any) -> tuple[str, str] | None:
        """What needs an engine that is the server's only one and is not stopped, and why; None: nothing."""
        return None

    def is_local(self, options: Any) -> bool:
        """Whether all workers are on the engine's machine, with its files."""
        return True

    def worker_node(self, options: Any) -> str | None:
        """``"package.module:class"`` of a ``WorkerNode`` where its options say that this machine only holds workers."""
        return None

    def refusal(self, facts: Facts) -> str | None:
        if self.max_tp_size is not None and facts.tp_size > self.max_tp_size:
            workers = "one worker" if self.max_tp_size == 1 else f"at most {self.max_tp_size} workers"
            return f"runs {workers}, but --tensor-parallel-size is {facts.tp_size}: leave --executor out, or say auto"
        if facts.pp_size > 1 and not self.has_stages:
            return f"runs models whole, but --pipeline-parallel-size is {facts.pp_size}: leave --executor out"
        return super().refusal(facts)

    def is_meant_for(self, facts: Facts) -> bool:
        fits = self.max_tp_size is None or facts.tp_size <= self.max_tp_size
        return fits and (self.has_stages or facts.pp_size == 1)
