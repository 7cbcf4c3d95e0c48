"""Exchanging plugins while the server runs, for the families where no weight, K/V or process depends on them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from fwk.config import Config
from fwk.errors import ConfigError, InvalidRequest, PluginError, PluginLoadError, RequestFailed
from fwk.features.declared import declared
from fwk.interfaces.declaration import Host
from fwk.interfaces.dialect import Dialect, DialectContext
from fwk.interfaces.lifecycle import PluginLifecycle
from fwk.interfaces.observer import Observer, ObserverContext, ObserverSpec
from fwk.interfaces.sampling import LogitsProcessorSpec
from fwk.plugins import FAMILIES, PluginFactory, PluginSet, Registered, find, taking_part
from fwk.plugins.families import ORDER, PARTS
from fwk.plugins.options import flag, normal
from fwk.plugins.selection import is_enabled, is_named, leave_out, plugin_options
from fwk.server.frontend import ServerFrontend
from fwk.server.lifecycle import LifecycleManager
from fwk.server.model_engines import ModelEngines
from fwk.server.observer_dispatch import Listener, Observers
from fwk.server.parsers import ParserChoice, Parsers
from fwk.server.route_registry import RouteRegistry

log = logging.getLogger(__name__)

NONE = "none"


class SwitchOrder(BaseModel):
    """``POST /plugins/switch``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    family: str = Field(max_length=64)
    name: str = Field(max_length=64)
    options: dict[str, Any] = Field({}, max_length=256)
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class ServerComponents:
    """What is exchanged, and what that takes."""

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


@dataclass(slots=True)
class _Change:
    """One switch: what for, and the configuration once it is done."""

    item: Registered
    is_on: bool
    config: Config
    before: Config = field(repr=False)

    @property
    def values(self) -> Mapping[str, object]:
        return self.config.plugin_options.get(self.item.key, {})


class PluginSwitcher:
    """Knows what takes part now, and changes it: one switch at a time, each of them whole or not at all."""

    def __init__(self, config: Config, plugins: PluginSet, components: ServerComponents, template: str) -> None:
        self.config = config
        self._plugins = plugins
        self._components = components
        self._template = template
        self._lock = asyncio.Lock()
        self._running: dict[str, _Running] = {}
        self._is_ready = False
        self._policy = ""
        self._off: set[str] = set()  # logits processors
        self._families: dict[str, Callable[[_Change], Awaitable[None]]] = {
            "schedulers": self._switch_policy,
            "logits_processors": self._switch_processor,
            "tool_parsers": self._switch_parser,
            "reasoning_parsers": self._switch_parser,
            "observers": self._switch_served,
            "dialects": self._switch_served,
        }

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
        self._is_ready = True
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

    def routes(self, app: FastAPI) -> None:
        """Add the administrator's route."""

        @app.post("/plugins/switch")
        async def switch_plugin(order: SwitchOrder) -> dict[str, Any]:
            # A client that goes away meanwhile must not leave half of it.
            return await asyncio.shield(asyncio.ensure_future(self.switch(order)))

    async def switch(self, order: SwitchOrder) -> dict[str, Any]:
        """Carry out an order. Raises ``InvalidRequest`` or ``RequestFailed``; then nothing has changed."""
        async with self._lock:
            if not self._is_ready:
                raise InvalidRequest("the engines are starting: try again when they serve")
            try:
                change = self._checked(order)
                await self._families[order.family](change)
            except PluginLoadError as error:
                log.exception("%s.%s could not be switched", order.family, order.name)
                raise RequestFailed(
                    f"{order.family}.{order.name} failed to start and nothing was changed; the server's log says why"
                ) from error
            except (ConfigError, PluginError) as error:
                raise InvalidRequest(str(error)) from error
            self.config = change.config
            log.info("%s was switched %s", change.item.key, "on" if change.is_on else "off")
            return {
                "plugin": change.item.key,
                "enabled": change.is_on,
                "chosen": self.chosen(),
                "active": self.active(),
            }

    def _factory(self, config: Config) -> PluginFactory:
        return PluginFactory(self._plugins, config.plugin_options)

    def _checked(self, order: SwitchOrder) -> _Change:
        """What an order comes to, validated as at the start."""
        family = FAMILIES.get(order.family)
        if family is None:
            raise InvalidRequest(f"unknown family {order.family!r}; there are {', '.join(FAMILIES)}", "family")
        if order.family not in self._families:
            how = f" with {flag(family.option)} {order.name}" if family.option is not None else ""
            raise InvalidRequest(
                f"a {family.noun} cannot be exchanged while the server runs, for weights, K/V or processes were made "
                f"for it: restart{how}",
                "family",
            )
        item = find(self._plugins, order.family, order.name)
        values = {normal(name): value for name, value in order.options.items()}
        if not order.enabled and values:
            raise InvalidRequest("options are for a plugin that is switched on", "options")
        plugin_options(item, {item.key: values})
        is_of_engine = order.family in (*ORDER, *PARTS)  # then the engines know whether it can join them
        refusal = item.declaration.needs.refusal(Host()) if order.enabled and not is_of_engine else None
        if refusal is not None:
            raise PluginError(f"{family.noun} {item.name!r} ({item.package}) cannot be used: it {refusal}")
        if order.enabled and not is_enabled(item.declaration, values):
            ways = " or ".join(item.declaration.enabled_by)
            raise InvalidRequest(f"{item.key} is off unless its options say {ways}", "options")
        return _Change(item, order.enabled, self._after(item, values, order.enabled), self.config)

    def _after(self, item: Registered, values: Mapping[str, object], is_on: bool) -> Config:
        """The configuration that says so."""
        config, family = self.config, FAMILIES[item.family]
        kept = {
            key: own
            for key, own in config.plugin_options.items()
            if key != item.key and (family.takes_all or key.partition(".")[0] != item.family)
        }
        has_entry = bool(values) or not is_named(item, {})
        config = replace(config, plugin_options=kept | ({item.key: dict(values)} if is_on and has_entry else {}))
        if family.option is None:
            return config
        name = {family.option: item.name if is_on else NONE}
        if family.option in type(config.engine).model_fields:
            return replace(config, engine=config.engine.model_copy(update=name))
        return replace(config, server=config.server.model_copy(update=name))

    async def _switch_policy(self, change: _Change) -> None:
        if not change.is_on:
            raise InvalidRequest("there is always a schedule policy: switch another one on instead", "enabled")
        old = find(self._plugins, "schedulers", self._policy)
        before = (old.family, old.name, change.before.plugin_options.get(old.key, {}), True)
        await self._components.engines.switch((old.family, change.item.name, change.values, True), before)
        self._policy = change.item.name

    async def _switch_processor(self, change: _Change) -> None:
        item = change.item
        assert isinstance(item.declaration, LogitsProcessorSpec)
        if not change.is_on and item.declaration.params is None:
            raise InvalidRequest(
                f"{item.key} serves fields that every request may have, and would leave them without effect", "enabled"
            )
        before = change.before.plugin_options.get(item.key, {})
        await self._components.engines.switch(
            (item.family, item.name, change.values, change.is_on),
            (item.family, item.name, before, item.key not in self._off),
        )
        self._components.frontend.switch_processor(item, change.is_on)
        (self._off.discard if change.is_on else self._off.add)(item.key)

    async def _switch_parser(self, change: _Change) -> None:
        name = change.item.name if change.is_on else NONE
        choice = ParserChoice(change.item.family, name, self._factory(change.config), self._template)
        self._components.parsers.use(change.item.family, choice)

    async def _switch_served(self, change: _Change) -> None:
        declaration = change.item.declaration
        if isinstance(declaration, ObserverSpec) and declaration.worker is not None and change.is_on:
            raise InvalidRequest(
                f"{change.item.key} has a part in the workers, which is made when they start: restart with its options"
            )
        if change.is_on:
            await self._serve(change.item, self._factory(change.config))
        elif change.item.key in self._running:
            self._components.routes.remove(change.item.key)
            await self._retire(self._running.pop(change.item.key))

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
            if self._is_ready:
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
