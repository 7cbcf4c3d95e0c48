"""How the engine reaches its workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from fwk.interfaces.declaration import Declaration
from fwk.types import Batch, StepResult


class Worker(ABC):
    """Owns one device: model, KV cache, sampler. Core supplies it; executors place it."""

    @abstractmethod
    def load(self) -> WorkerInfo:
        """Load weights and allocate the KV cache."""

    @abstractmethod
    def execute(self, batch: Batch) -> StepResult:
        """Run one step. An exception leaves the worker unusable."""

    @abstractmethod
    def call(self, name: str, *args: Any) -> Any:
        """Run an out-of-step operation (weight update, profile, ...) by its registered name."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What the engine learns once the workers are loaded."""

    num_blocks: int
    vocab_size: int
    chosen: dict[str, str]
    reasons: tuple[str, ...] = ()
    num_lookahead: int = 0  # most drafts for one sequence: tokens past the newest one that need blocks


@dataclass(frozen=True, slots=True)
class ExecutorContext:
    """What an executor is built with. ``make_worker(rank, size)`` makes a worker in the calling process."""

    make_worker: Callable[[int, int], Worker]
    options: Any = None


class Executor(ABC):
    """Runs batches on all workers, in the order of ``launch``."""

    depth: int = 1
    """Steps in flight the executor gains from: 2 hides the scheduling of step N+1 behind step N.

    The engine may use fewer: drafts are made from a step's tokens, so with a speculative decoder it keeps to 1.
    """

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
        """Run an out-of-step operation on every worker, between steps."""

    @abstractmethod
    def close(self) -> None:
        """Stop the workers. Idempotent; never hangs."""


@dataclass(frozen=True, kw_only=True)
class ExecutorSpec(Declaration):
    """Declares an executor."""

    family: ClassVar[str] = "executors"
