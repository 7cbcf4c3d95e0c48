"""Runs steps one after the other in a thread, so that whoever launched one need not wait for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from fwk.errors import EngineDead
from fwk.interfaces.executor import Executor, ExecutorContext, Worker, WorkerInfo
from fwk.interfaces.parallel import SingleRank
from fwk.types import Batch, StepResult

CLOSE_SECONDS = 2.0
"""How long a step may still run when the engine stops; the thread of one that hangs ends with the process."""

_Job = tuple[Callable[[], Any], "Future[Any]", bool]


class ThreadedExecutor(Executor):
    """One worker, which lives on one thread: model, kernels' thread pool and device context are that thread's.

    A step that fails leaves the worker unusable: whatever was launched behind it fails with the same exception.
    """

    depth = 2

    def __init__(self, context: ExecutorContext) -> None:
        super().__init__(context)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fwk-worker", daemon=True)
        self._is_closed = False
        self._worker: Worker | None = None
        self._broken: BaseException | None = None

    def load(self) -> WorkerInfo:
        self._thread.start()
        return self._submit(self._load, is_step=True).result()

    def launch(self, batch: Batch) -> Future[StepResult]:
        worker = self._loaded()
        return self._submit(lambda: worker.execute(batch), is_step=True)

    def collect(self, pending: Future[StepResult]) -> StepResult:
        return pending.result()

    def call(self, name: str, *args: Any) -> list[Any]:
        worker = self._loaded()
        return [self._submit(lambda: worker.call(name, *args), is_step=False).result()]

    def close(self) -> None:
        self._is_closed = True
        self._broken = self._broken or EngineDead("the executor is closed")  # what still waits does not run
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)

    def _load(self) -> WorkerInfo:
        self._worker = self.context.make_worker(SingleRank())
        return self._worker.load()

    def _loaded(self) -> Worker:
        assert self._worker is not None, "load comes first"
        return self._worker

    def _submit(self, work: Callable[[], Any], *, is_step: bool) -> Future[Any]:
        if self._is_closed:
            raise EngineDead("the executor is closed")
        future: Future[Any] = Future()
        self._jobs.put((work, future, is_step))
        return future

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, future, is_step = job
            try:
                if self._broken is not None:
                    raise self._broken
                result = work()
            except BaseException as error:  # the thread must answer, whatever happened; the engine's thread raises it
                if is_step:
                    self._broken = error
                future.set_exception(error)
            else:
                future.set_result(result)
        if self._worker is not None:
            self._worker.close()
