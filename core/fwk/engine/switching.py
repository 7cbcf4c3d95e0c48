"""The engine's part in exchanging a plugin while it runs: between two steps, without losing a request."""

from __future__ import annotations

from collections.abc import Mapping

from fwk.engine.scheduler import Scheduler
from fwk.errors import EngineDead, PluginError
from fwk.interfaces.executor import Executor
from fwk.interfaces.schedule import ScheduleContext
from fwk.plugins import FAMILIES, PluginFactory, PluginSet, Resolution, find


class EngineSwitch:
    """Builds what takes over, then exchanges it."""

    def __init__(self, plugins: PluginSet, scheduler: Scheduler, executor: Executor, resolution: Resolution) -> None:
        self._plugins = plugins
        self._resolution = resolution
        self._scheduler = scheduler
        self._executor = executor

    def switch(self, family: str, name: str, options: Mapping[str, object], is_on: bool) -> None:
        """Use a plugin with these options from now on, or use it no more. Raises ``FwkError``; then nothing changed."""
        item = find(self._plugins, family, name)
        factory = PluginFactory(self._plugins, {item.key: options})
        own = factory.options(item)
        why = self._resolution.refusal(item, own) if is_on else None
        if why is not None:
            raise PluginError(f"{FAMILIES[family].noun} {name!r} ({item.package}) cannot be used: it {why}")
        if family == "logits_processors":
            errors = self._executor.call("prepare_processor", name, dict(options), is_on)
            if any(errors):
                raise PluginError(next(error for error in errors if error))
            self._executor.call("use_processor")
        elif family == "schedulers" and is_on:
            policy = factory.build(item, ScheduleContext)
            try:
                self._scheduler.switch_policy(policy, item.label)
            except EngineDead as error:
                raise PluginError(str(error)) from error
        else:
            raise PluginError(f"{item.key} cannot be switched in a running engine")
