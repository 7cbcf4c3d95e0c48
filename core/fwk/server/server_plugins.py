"""The plugins that a served model has in the server, and which of its engines' may be others than at the start."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fwk.config import Config
from fwk.errors import PluginLoadError
from fwk.features.declared import declared
from fwk.interfaces.dialect import Dialect, DialectContext
from fwk.interfaces.feature import RunningPlugins
from fwk.interfaces.lifecycle import PluginLifecycle
from fwk.interfaces.observer import Observer, ObserverContext
from fwk.plugins import FAMILIES, PluginFactory, PluginSet, Registered, taking_part
from fwk.plugins.selection import leave_out
from fwk.server.frontend import ServerFrontend
from fwk.server.lifecycle import LifecycleManager
from fwk.server.model_engines import ModelEngines
from fwk.server.observer_dispatch import Listener, Observers
from fwk.server.parsers import ParserChoice, Parsers
from fwk.server.route_registry import RouteRegistry

NONE = "none"


@dataclass(frozen=True, slots=True)
class ServerComponents:
    """What plugins are given to, and what they are given."""

    frontend: ServerFrontend
    observers: Observers
    parsers: Parsers
    routes: RouteRegistry
    engines: ModelEngines
    lifecycles: LifecycleManager
    degraded: Callable[[], str | None] = lambda: None
    shared: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])  # ObserverContext.shared


@dataclass(slots=True)
class _Running:
    """A dialect or an observer that takes part."""

    lifecycle: PluginLifecycle
    listener: Listener | None = None


def _as_ids(token_ids: Sequence[int]) -> str:
    """What stands for a text where there is no tokenizer."""
    return " ".join(map(str, token_ids))


@dataclass(slots=True)
class _Told:
    """Whom an observer's routes wait for: it is there once the observer is told things."""

    listener: Listener | None = None

    async def settle(self) -> None:
        if self.listener is not None:
            await self.listener.settle()


class ServerPlugins(RunningPlugins):
    """Builds observers and dialects, and knows what takes part now."""

    families = FAMILIES

    def __init__(self, config: Config, plugins: PluginSet, components: ServerComponents, template: str) -> None:
        self.config = config
        self._plugins = plugins
        self._components = components
        self._template = template
        self._running: dict[str, _Running] = {}
        self.is_ready = False
        self._policy = ""
        self._off: set[str] = set()  # logits processors

    async def start(self) -> None:
        """Build the observers and dialects that take part. Raises ``PluginError`` in a plugin's name.

        A third party's that cannot be imported or built, and was given no options, is left out.
        """
        for family in ("observers", "dialects"):
            for item, _ in taking_part(self._plugins, family, self.config.plugin_options):
                try:
                    await self._serve(item, self._factory(self.config))
                except PluginLoadError as error:
                    if not leave_out(self._plugins, item, self.config.plugin_options, error):
                        raise
        options = self.config.plugin_options
        known = {item.key for item, _ in taking_part(self._plugins, "logits_processors", options, host=None)}
        for item in self._plugins.family("logits_processors"):
            if item.key not in known:
                self._off.add(item.key)
                self._components.frontend.switch_processor(item, False)

    async def ready(self, chosen: Mapping[str, str]) -> None:
        """The engines serve with what they have ``chosen``."""
        self._policy = chosen.get("schedulers", "")
        self.is_ready = True
        await self._components.lifecycles.ready()

    def chosen(self) -> dict[str, str]:
        """Which plugin of each family that can be switched and chooses one is used now."""
        parsers = self._components.parsers
        found = {"schedulers": self._policy} if self._policy else {}
        return found | {"tool_parsers": parsers.tool.name, "reasoning_parsers": parsers.reasoning.name}

    def active(self) -> list[str]:
        """The plugins that take part now, of families of which several do."""
        processors = [item.key for item in self._plugins.family("logits_processors") if item.key not in self._off]
        return sorted([*self._running, *processors])

    def fingerprint(self, chosen: Mapping[str, str]) -> str:
        """Equal for two servers exactly when the same plugins are used, with the same options."""
        options = {key: dict(values) for key, values in self.config.plugin_options.items() if values}
        told = [self._plugins.fingerprint, dict(chosen), self.active(), options]
        return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def _factory(self, config: Config) -> PluginFactory:
        return PluginFactory(self._plugins, config.plugin_options)

    async def use(self, item: Registered, config: Config, *, is_on: bool) -> None:
        match item.family:
            case "observers" | "dialects" if is_on:
                await self._serve(item, self._factory(config))
            case "observers" | "dialects":
                if item.key in self._running:
                    self._components.routes.remove(item.key)
                    await self._retire(self._running.pop(item.key))
            case "tool_parsers" | "reasoning_parsers":
                choice = ParserChoice(item.family, item.name if is_on else NONE, self._factory(config), self._template)
                self._components.parsers.use(item.family, choice)
            case "logits_processors":
                self._components.frontend.switch_processor(item, is_on)
                (self._off.discard if is_on else self._off.add)(item.key)
            case "schedulers":
                self._policy = item.name
            case _:
                raise AssertionError(f"{item.key} is not exchanged in a server")
        self.config = config

    async def _serve(self, item: Registered, factory: PluginFactory) -> None:
        """Have a dialect or an observer take part, in place of the one of its name. Nothing has changed if it fails."""
        lifecycles, routes, told = self._components.lifecycles, self._components.routes, _Told()
        lifecycle = lifecycles.make(item.source)
        if item.family == "dialects":
            frontend = self._components.frontend
            built: Dialect | Observer = factory.build(item, DialectContext, frontend=frontend, lifecycle=lifecycle)
        else:
            name = self._components.frontend.card.name
            text = self._components.frontend.text
            decode = partial(text.decode, skip_special_tokens=False) if text.has_tokenizer else _as_ids
            shared = self._components.shared.setdefault(item.key, {})
            built = factory.build(
                item,
                ObserverContext,
                model_name=name,
                lifecycle=lifecycle,
                settle=told.settle,
                decode=decode,
                shared=shared,
                call_workers=partial(self._call_workers, item.key),
                has_admin=routes.has_admin,
                degraded=self._components.degraded,
                feature_stats={f.name: spec.wire.stats for f, spec, _ in declared(factory) if spec.wire.stats},
            )
        await lifecycles.begin(lifecycle)
        try:
            if self.is_ready:
                await lifecycles.ready(lifecycle)
            dialect = built if isinstance(built, Dialect) else None
            public = () if dialect is None else dialect.public_paths
            routes.register(item.key, built.routes, built.admin_routes, dialect=dialect, public=public)
        except BaseException:
            await lifecycles.end(lifecycle)
            raise
        if isinstance(built, Observer):
            told.listener = self._components.observers.add(built, item.key)
        old = self._running.get(item.key)
        self._running[item.key] = _Running(lifecycle, told.listener)
        if old is not None:
            await self._retire(old)

    async def _call_workers(self, key: str, operation: str, *args: Any) -> list[list[Any]]:
        return await self._components.engines.call_workers(f"{key}.{operation}", *args)

    async def _retire(self, running: _Running) -> None:
        """End the life of what takes part no more."""
        if running.listener is not None:
            self._components.observers.remove(running.listener)
        await self._components.lifecycles.drain(running.lifecycle)
        if running.listener is not None:
            await asyncio.to_thread(running.listener.close)
        await self._components.lifecycles.end(running.lifecycle)
