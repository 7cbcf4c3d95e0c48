"""The part in the server: one switch at a time, each of them whole or not at all, in all engines or in none."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from fwk.config import Config
from fwk.errors import ConfigError, FwkError, InvalidRequest, PluginError, PluginLoadError, RequestFailed
from fwk.interfaces.feature import Ask, Plugins, RunningPlugins, ServerPart, ServerPartContext
from fwk.interfaces.observer import ObserverSpec
from fwk.interfaces.sampling import LogitsProcessorSpec

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger(__name__)

FAMILIES = ("schedulers", "logits_processors", "tool_parsers", "reasoning_parsers", "observers", "dialects")
IN_ENGINES = ("schedulers", "logits_processors")

Switching = tuple[str, str, Mapping[str, object], bool]
"""Family and name of a plugin, its options, and whether it is used from now on or no more."""


class SwitchOrder(BaseModel):
    """``POST /plugins/switch``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    family: str = Field(max_length=64)
    name: str = Field(max_length=64)
    options: dict[str, Any] = Field({}, max_length=256)
    enabled: bool = True


class PluginSwitcher(ServerPart):
    """Carries out orders of the administrator's, and repeats them for engines that start later."""

    def __init__(self, context: ServerPartContext) -> None:
        super().__init__(context)
        self._lock = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._switched: dict[tuple[str, str], Switching] = {}

    def admin_routes(self, app: FastAPI) -> None:
        @app.post("/plugins/switch")
        async def switch_plugin(order: SwitchOrder) -> dict[str, Any]:
            # A client that goes away meanwhile must not leave half of it.
            return await asyncio.shield(asyncio.ensure_future(self.switch(order)))

    async def engine_begins(self, ask: Ask) -> None:
        for switching in list(self._switched.values()):
            await ask("switch", 0, *switching)

    @property
    def _running(self) -> RunningPlugins:
        assert self.context.running is not None, "fwk.LLM has no routes"
        return self.context.running

    @property
    def _plugins(self) -> Plugins:
        assert self.context.plugins is not None
        return self.context.plugins

    async def switch(self, order: SwitchOrder) -> dict[str, Any]:
        """Carry out an order. Raises ``InvalidRequest`` or ``RequestFailed``; then nothing has changed."""
        async with self._lock:
            running = self._running
            if not running.is_ready:
                raise InvalidRequest("the engines are starting: try again when they serve")
            try:
                item, values = self._checked(order)
                if order.family in IN_ENGINES:
                    await self.switch_engines(*self._of_engines(item, values, order.enabled))
                await running.use(item, self._after(item, values, order.enabled), is_on=order.enabled)
            except PluginLoadError as error:
                log.exception("%s.%s could not be switched", order.family, order.name)
                raise RequestFailed(
                    f"{order.family}.{order.name} failed to start and nothing was changed; the server's log says why"
                ) from error
            except (ConfigError, PluginError) as error:
                raise InvalidRequest(str(error)) from error
            log.info("%s was switched %s", item.key, "on" if order.enabled else "off")
            return {
                "plugin": item.key,
                "enabled": order.enabled,
                "chosen": running.chosen(),
                "active": running.active(),
            }

    def _checked(self, order: SwitchOrder) -> tuple[Any, dict[str, object]]:
        """The plugin of an order, and its options, validated as at the start."""
        families = self._running.families
        family = families.get(order.family)
        if family is None:
            raise InvalidRequest(f"unknown family {order.family!r}; there are {', '.join(families)}", "family")
        if order.family not in FAMILIES:
            how = f" with --{family.option.replace('_', '-')} {order.name}" if family.option is not None else ""
            raise InvalidRequest(
                f"a {family.noun} cannot be exchanged while the server runs, for weights, K/V or processes were made "
                f"for it: restart{how}",
                "family",
            )
        item = self._plugins.find(order.family, order.name)
        values: dict[str, object] = {
            name.strip().lstrip("-").replace("-", "_"): value for name, value in order.options.items()
        }
        if order.enabled:
            self._plugins.joining(item, values)
        elif values:
            raise InvalidRequest("options are for a plugin that is switched on", "options")
        self._refuse(item, order.enabled)
        return item, values

    def _refuse(self, item: Any, is_on: bool) -> None:
        """Raise ``InvalidRequest`` for what would be half a switch."""
        declaration = item.declaration
        if item.family == "schedulers" and not is_on:
            raise InvalidRequest("there is always a schedule policy: switch another one on instead", "enabled")
        if isinstance(declaration, LogitsProcessorSpec) and not is_on and declaration.params is None:
            raise InvalidRequest(
                f"{item.key} serves fields that every request may have, and would leave them without effect", "enabled"
            )
        if isinstance(declaration, ObserverSpec) and declaration.worker is not None and is_on:
            raise InvalidRequest(
                f"{item.key} has a part in the workers, which is made when they start: restart with its options"
            )

    def _after(self, item: Any, values: Mapping[str, object], is_on: bool) -> Config:
        """The configuration once it is done."""
        config, family = self._running.config, self._running.families[item.family]
        kept = {
            key: own
            for key, own in config.plugin_options.items()
            if key != item.key and (family.takes_all or key.partition(".")[0] != item.family)
        }
        is_named = family.takes_all and item.package != "fwk"  # another package's takes part by its entry
        entry = {item.key: dict(values)} if is_on and (values or is_named) else {}
        config = replace(config, plugin_options=kept | entry)
        if family.option is None:
            return config
        name = {family.option: item.name if is_on else "none"}
        if family.option in type(config.engine).model_fields:
            return replace(config, engine=config.engine.model_copy(update=name))
        return replace(config, server=config.server.model_copy(update=name))

    def _of_engines(self, item: Any, values: Mapping[str, object], is_on: bool) -> tuple[Switching, Switching]:
        """What engines are told, and what takes them back."""
        running = self._running
        options = running.config.plugin_options
        new = (item.family, item.name, values, is_on)
        if item.family == "schedulers":
            old = self._plugins.find("schedulers", running.chosen()["schedulers"])
            return new, (old.family, old.name, options.get(old.key, {}), True)
        return new, (item.family, item.name, options.get(item.key, {}), item.key in running.active())

    async def switch_engines(self, new: Switching, old: Switching) -> None:
        """Exchange a plugin in every engine that lives, or in none; engines to come get it before they serve.

        Raises ``InvalidRequest`` when an engine cannot: those that could go back to ``old``.
        """
        number = next(self._numbers)
        try:
            await self.context.ask("switch", number, *new)
        except InvalidRequest as error:
            with contextlib.suppress(FwkError):
                await self.context.ask("take_back", number, *old)
            raise InvalidRequest(str(error), "options") from error
        self._switched[new[:2] if new[0] == "logits_processors" else (new[0], "")] = new
