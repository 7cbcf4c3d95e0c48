"""Observers' parts in a worker: told of its steps, and asked by the server's process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fwk.config import Config
from fwk.errors import one_line_traceback
from fwk.features.worker import run_operation
from fwk.interfaces.feature import StepRunner
from fwk.interfaces.observer import ObserverSpec, WorkerObserver, WorkerObserverContext
from fwk.plugins import PluginFactory, PluginSet, taking_part
from fwk.types import Batch

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Part:
    """An observer's part, and whether it is still told of steps."""

    key: str
    observer: WorkerObserver
    is_told: bool

    def tell(self, call: Callable[..., None], *args: Any) -> None:
        """Make a call; one that raises is the last."""
        if not self.is_told:
            return
        try:
            call(*args)
        except Exception as error:
            self.is_told = False
            log.error("%s raised in a step and is told of no more: %s", self.key, one_line_traceback(error))
            log.debug("what it raised", exc_info=error)


class WorkerObservers:
    """The parts of all observers that have one."""

    def __init__(self, config: Config, plugins: PluginSet, context: Callable[..., WorkerObserverContext]) -> None:
        """Build them: ``context`` lacks the options. Raises ``FwkError`` in a plugin's name."""
        self._parts: list[_Part] = []
        self.reader = ""
        """The plugin for which layers are called in each step; empty if there is none."""
        for item, options in taking_part(plugins, "observers", config.plugin_options, host=None):
            assert isinstance(item.declaration, ObserverSpec)
            if item.declaration.worker is None:
                continue
            observer: WorkerObserver | None = PluginFactory(plugins, config.plugin_options).build_or_leave_out(
                item, context(options=options), item.declaration.worker
            )
            if observer is None:
                continue
            if item.declaration.reads_layers:
                self.reader = item.key
            self._parts.append(_Part(item.key, observer, observer.wants_steps))

    def operations(self) -> dict[str, Callable[..., Any]]:
        """What can be called of them: ``family.plugin.operation``."""
        return {
            f"{part.key}.{name}": partial(
                run_operation, getattr(part.observer.operations, "who", part.key), name, operation
            )
            for part in self._parts
            for name, operation in part.observer.operations().items()
        }

    def model_loaded(self, model: Any) -> None:
        """The served model is there."""
        for part in self._parts:
            part.observer.model_loaded(model)

    def around(self, runner: StepRunner) -> StepRunner:
        """The runner, telling those who want it of each step; the same where nobody does."""
        told = [part for part in self._parts if part.is_told]
        return ObservedRunner(runner, told) if told else runner

    def close(self) -> None:
        """The worker stops."""
        for part in self._parts:
            part.is_told = True
            part.tell(part.observer.close)


class ObservedRunner:
    """A runner whose steps are told of."""

    def __init__(self, runner: StepRunner, parts: list[_Part]) -> None:
        self._runner = runner
        self._parts = parts
        self.collect = runner.collect
        self.settle = runner.settle

    def launch(self, batch: Batch) -> Any:
        """As the runner does."""
        for part in self._parts:
            part.tell(part.observer.step_begins, batch)
        pending = self._runner.launch(batch)
        for part in self._parts:
            part.tell(part.observer.step_launched)
        return pending
