"""One worker in the engine's own process; a step runs when it is launched."""

from __future__ import annotations

from typing import Any

from fwk.interfaces.executor import Executor, ExecutorContext, WorkerInfo
from fwk.interfaces.parallel import SingleRank
from fwk.types import Batch, StepResult


class MineExecutor(Executor):
    """The shortest one possible."""

    def __init__(self, context: ExecutorContext) -> None:
        super().__init__(context)
        self._worker = context.make_worker(SingleRank())

    def load(self) -> WorkerInfo:
        return self._worker.load()

    def launch(self, batch: Batch) -> StepResult:
        return self._worker.execute(batch)

    def collect(self, pending: StepResult) -> StepResult:
        return pending

    def call(self, name: str, *args: Any) -> list[Any]:
        return [self._worker.call(name, *args)]

    def close(self) -> None:
        self._worker.close()
