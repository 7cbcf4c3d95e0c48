"""Puts the pools of a served model's engines together, from the outermost down to core's own of one engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fwk.config import Config
from fwk.interfaces.declaration import Facts
from fwk.interfaces.engine_pool import Engine, EnginePool, EnginePoolContext
from fwk.interfaces.lifecycle import PluginLifecycle
from fwk.plugins import PluginFactory, PluginSet, Selection, build, choose
from fwk.plugins.pools import engine_module, num_engines, num_pools, pools_on
from fwk.plugins.selection import check_used
from fwk.server.engine_forks import EngineForks
from fwk.server.engine_process import EngineProcess, run_engine
from fwk.server.one_engine import OneEngine


class PoolBuilder:
    """Builds the pools that a model's options turn on. engines: where those of this machine come from.

    context: an ``EnginePoolContext`` that lacks below, choose, options, shared and lifecycle. shared: dictionaries for
    the pools of all models, by plugin.
    """

    def __init__(
        self,
        config: Config,
        plugins: PluginSet,
        engines: EngineForks,
        context: Callable[..., EnginePoolContext],
        shared: dict[str, dict[str, Any]],
    ) -> None:
        self._config = config
        self._factory = PluginFactory(plugins, config.plugin_options)
        self._context = context
        self._shared = shared
        self._on = pools_on(plugins, config.plugin_options)
        self.num_engines = num_engines(plugins, config.plugin_options)
        self._new_process = engines.of(self.num_engines).take
        if module := engine_module(plugins, config.plugin_options):
            self._new_process = lambda: EngineProcess(partial(run_engine, module, self.num_engines))
        self.selections: list[Selection] = []
        self.lifecycles: list[PluginLifecycle] = []
        self.by_plugin: dict[str, EnginePool] = {}
        """The first pool of each plugin."""

    def build(self, begins: Callable[[Engine], Awaitable[None]]) -> EnginePool:
        """The outermost pool. begins: as for ``OneEngine``."""
        return self._make(begins, 0, 0)

    def _make(self, begins: Callable[[Engine], Awaitable[None]], level: int, index: int) -> EnginePool:
        """The ``index``-th of the pools at a level of the stack."""
        if level == len(self._on):
            fingerprint = self._factory.plugins.fingerprint
            return OneEngine(self._config, fingerprint, begins, index, self.num_engines, self._new_process)
        item, options = self._on[level]
        first = index * num_pools(item, options)
        context = self._context(
            below=lambda i: self._make(begins, level + 1, first + i),
            choose=self._choose,
            options=options,
            shared=self._shared.setdefault(item.key, {}),
            lifecycle=self._lifecycle(item.source),
        )
        pool = build(item, context)
        self.by_plugin.setdefault(item.key, pool)
        return pool

    def _choose(self, family: str, name: str, context: Callable[..., object], **fields: Any) -> Any:
        selection = choose(self._factory.plugins, family, name, Facts())
        item = selection.chosen
        assert item is not None
        self.selections.append(selection)
        check_used(self._factory.plugins, self._config.plugin_options, {family: item.name})
        return self._factory.build(item, partial(context, lifecycle=self._lifecycle(item.source)), **fields)

    def _lifecycle(self, owner: str) -> PluginLifecycle:
        self.lifecycles.append(PluginLifecycle(owner))
        return self.lifecycles[-1]
