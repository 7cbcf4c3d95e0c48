"""Runs a step in the engine's own thread."""

from __future__ import annotations

from typing import Any

from fwk.interfaces.executor import Executor, ExecutorContext, WorkerInfo
from fwk.interfaces.parallel import SingleRank
from fwk.types import Batch, StepResult


class InProcessExecutor(Executor):
    """One worker, called directly.

    On a CPU there is nothing to overlap, so ``launch`` computes. A device is given the next step before the last one is
    collected: its worker says so.
    """

    def __init__(self, context: ExecutorContext) -> None:
        super().__init__(context)
        self._worker = context.make_worker(SingleRank())

    def load(self) -> WorkerInfo:
        loaded = self._worker.load()
        self.depth, self.launches_ahead = loaded.depth, loaded.depth > 1
        return loaded

    def launch(self, batch: Batch) -> Any:
        return self._worker.launch(batch)

    def collect(self, pending: Any) -> StepResult:
        return self._worker.collect(pending)

    def call(self, name: str, *args: Any) -> list[Any]:
        return [self._worker.call(name, *args)]

    def close(self) -> None:
        """The worker goes with the process; what it writes elsewhere is finished."""
        self._worker.close()
