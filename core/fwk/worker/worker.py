"""A worker in this process: it owns one device, and runs the engine's steps on it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fwk.config import Config
from fwk.errors import FwkError, PluginFault, one_line_traceback
from fwk.interfaces.executor import Worker, WorkerInfo
from fwk.interfaces.feature import StepRunner
from fwk.interfaces.parallel import ParallelGroup
from fwk.setup.resolve import ModelSetup
from fwk.types import Batch, StepResult
from fwk.worker.builder import WorkerBuilder
from fwk_process.malloc import large_blocks_returned
from fwk_process.threads import half_of_torchs_threads

log = logging.getLogger(__name__)


class LocalWorker(Worker):
    """Loads the model, executes batches, and answers the engine's calls. ``WorkerBuilder`` makes its parts."""

    def __init__(self, config: Config, setup: ModelSetup, group: ParallelGroup, engine_index: int = 0) -> None:
        self._builder = WorkerBuilder(config, setup, group, engine_index)
        # Of several ranks, which wait for one another, or of steps that others were launched after, all is lost.
        self._may_lose_a_step = group.everyone.size == 1 and setup.device.is_host
        self._parts = self._builder.parts
        self._operations = self._parts.operations
        self._runner: StepRunner | None = None
        self._between_steps: Sequence[Callable[[], None]] = ()

    @torch.inference_mode()
    def load(self) -> WorkerInfo:
        with half_of_torchs_threads(), large_blocks_returned():
            info = self._builder.build()
        if self._parts.runner is not None and self._parts.observers is not None:
            self._runner = self._parts.observers.around(self._parts.runner)
        if self._parts.features is not None and self._runner is not None:
            self._runner = self._parts.features.around(self._runner)
            self._between_steps = self._parts.features.between_steps()
        return info

    def execute(self, batch: Batch) -> StepResult:
        return self.collect(self.launch(batch))

    def launch(self, batch: Batch) -> Any:
        assert self._runner is not None, "load comes first"
        try:
            pending = self._runner.launch(batch)
        except PluginFault as error:
            if not self._may_lose_a_step:
                raise
            log.error("step %d is lost: %s: %s", batch.step, error, one_line_traceback(error.__cause__ or error))
            pending = StepResult(batch.step, [], failure=str(error))
        for work in self._between_steps:
            try:
                with torch.inference_mode():
                    work()
            except PluginFault as error:
                if not self._may_lose_a_step:
                    raise
                self._parts.troubles.append(f"{error}; it is asked no more")
                self._between_steps = [one for one in self._between_steps if one is not work]
        return pending

    def collect(self, pending: Any) -> StepResult:
        assert self._runner is not None, "load comes first"
        result = self._runner.collect(pending)
        if self._parts.troubles:
            result.troubles = (*self._parts.troubles, *result.troubles)
        return result

    def call(self, name: str, *args: Any) -> Any:
        operation = self._operations.get(name)
        if operation is None:
            raise FwkError(f"unknown worker operation {name!r}; there are {', '.join(self._operations)}")
        if self._runner is not None:
            self._runner.settle()
        return operation(*args)

    def close(self) -> None:
        self._parts.close()
