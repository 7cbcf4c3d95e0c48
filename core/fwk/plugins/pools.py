"""The pools of engines that a server's options turn on, and what follows from them before anything starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from fwk.config import Config
from fwk.errors import ConfigError
from fwk.interfaces.engine_pool import EnginePoolSpec
from fwk.plugins.discovery import PluginSet, Registered
from fwk.plugins.factory import load_object
from fwk.plugins.options import build_config, called, flag, normal
from fwk.plugins.selection import OFF, ranked, taking_part


def pools_on(plugins: PluginSet, given: Mapping[str, Mapping[str, object]]) -> list[tuple[Registered, Any]]:
    """The pools that take part, the outermost first, each with its validated options; given: ``plugin_options``."""
    return taking_part(plugins, "engine_pools", given)


def num_pools(item: Registered, options: Any) -> int:
    """How many pools one is made of."""
    assert isinstance(item.declaration, EnginePoolSpec)
    return item.declaration.num_pools(options)


def num_engines(plugins: PluginSet, given: Mapping[str, Mapping[str, object]]) -> int:
    """Engines of a model."""
    return math.prod(num_pools(item, options) for item, options in pools_on(plugins, given))


def engine_module(plugins: PluginSet, given: Mapping[str, Mapping[str, object]]) -> str:
    """What is run for an engine that is not a process of this machine (``EnginePoolSpec.process``); empty: it is."""
    modules = [
        item.declaration.process(options)
        for item, options in pools_on(plugins, given)
        if isinstance(item.declaration, EnginePoolSpec)
    ]
    return next(filter(None, modules), "")


def server_configs(plugins: PluginSet, given: Mapping[str, Any], tell: Callable[[str], None]) -> list[Config]:
    """The configuration of each model of a server, the first one's first. ``tell``: as for ``build_config``."""
    given = {normal(name): value for name, value in given.items()}
    for item in ranked(plugins, "engine_pools"):
        assert isinstance(item.declaration, EnginePoolSpec)
        configs = item.declaration.configs(given, partial(build_config, plugins, tell=tell), called(plugins))
        if configs is not None:
            return configs
    return [build_config(plugins, given, tell)]


def turned_on_by(plugins: PluginSet, config: Config) -> list[str]:
    """What was given that turns pools on, as the user writes it."""
    return [
        flag(name) if values[name] in (True, "true", "True") else f"{flag(name)} {_shown(values[name])}"
        for item, _ in pools_on(plugins, config.plugin_options)
        for values in (config.plugin_options.get(item.key, {}),)
        for name in item.declaration.enabled_by
        if values.get(name) not in OFF
    ]


def _shown(value: object) -> str:
    return " ".join(map(str, cast("Sequence[object]", value))) if isinstance(value, list | tuple) else str(value)


def refuse_pools(plugins: PluginSet, config: Config, alone: tuple[str, str] | None) -> None:
    """Raise ``ConfigError`` for pools where one engine is to be the only one, and stay; alone: what for, and why."""
    for given in turned_on_by(plugins, config) if alone is not None else ():
        what, why = alone or ("", "")
        raise ConfigError(f"{what} is not possible with {given}: {why}")


def model_router(plugins: PluginSet, config: Config) -> Callable[[Sequence[Any]], Any]:
    """What makes the application in front of several models' (``EnginePoolSpec.router``). Raises ``ConfigError``."""
    for item, _ in pools_on(plugins, config.plugin_options):
        if isinstance(item.declaration, EnginePoolSpec) and item.declaration.router:
            return load_object(item, item.declaration.router)
    raise ConfigError("several models need a pool of engines with a router (EnginePoolSpec.router), and none is on")
