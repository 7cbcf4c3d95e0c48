"""How the pools that options turn on are stacked, and what a server is without them."""

from __future__ import annotations

from functools import partial
from importlib.metadata import entry_points
from typing import Any

import pytest

from fwk.errors import ConfigError
from fwk.interfaces.engine_pool import EnginePool, EnginePoolContext
from fwk.plugins import PluginSet, discover
from fwk.plugins.pools import num_engines, server_configs
from fwk.server import one_engine
from fwk.server.pools import PoolBuilder


class Client:
    """An engine that is never started."""

    def __init__(self, config: Any, fingerprint: str, index: int, num_engines: int, new_process: Any) -> None:
        self.place = (index, num_engines, new_process())


class Forks:
    """Engines of this machine."""

    def __init__(self, num_engines: int = 0) -> None:
        self.num_engines = num_engines

    def of(self, num_engines: int) -> Forks:
        return Forks(num_engines)

    def take(self) -> str:
        return f"one of {self.num_engines}"


async def no_engine(engine: Any) -> None:
    raise AssertionError("no engine has started")


def stack(plugins: PluginSet, monkeypatch: pytest.MonkeyPatch, **given: Any) -> tuple[PoolBuilder, EnginePool]:
    monkeypatch.setattr(one_engine, "EngineClient", Client)
    [config] = server_configs(plugins, {"model": "m", **given}, print)
    context = partial(EnginePoolContext, model="m", name="m")
    builder = PoolBuilder(config, plugins, Forks(), context, {})  # type: ignore[arg-type]
    assert builder.num_engines == num_engines(plugins, config.plugin_options)
    return builder, builder.build(no_engine)


def shape(pool: EnginePool) -> Any:
    """Its class and those below it; of an engine, its place."""
    name = type(pool).__name__
    return pool._client.place if isinstance(pool, one_engine.OneEngine) else (name, *map(shape, pool.below))  # type: ignore[attr-defined]


ONE = (0, 1, "one of 1")
TWO = ((0, 2, "one of 2"), (1, 2, "one of 2"))


@pytest.mark.parametrize(
    ("given", "wanted", "families"),
    [
        ({}, ONE, []),
        ({"data_parallel_size": 1, "load_balance_method": "auto", "idle_timeout": None}, ONE, []),
        ({"data_parallel_size": 2}, ("Replicas", *TWO), ["load_balancers"]),
        ({"load_balance_method": "round_robin"}, ("Replicas", ONE), ["load_balancers"]),
        ({"idle_timeout": 1.0}, ("OnDemand", ONE), []),
        ({"idle_timeout": 1.0, "dp": 2}, ("OnDemand", ("Replicas", *TWO)), ["load_balancers"]),
    ],
)
async def test_pools_are_stacked_by_rank(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], wanted: Any, families: list[str]
) -> None:
    builder, pool = stack(discover(), monkeypatch, **given)
    assert shape(pool) == wanted
    assert [selection.family for selection in builder.selections] == families


async def test_without_the_plugins_there_is_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    points: list[Any] = [point for point in entry_points(group="fwk") if not point.name.startswith("engine_pools.")]
    plugins = discover(points=points)
    assert shape(stack(plugins, monkeypatch)[1]) == ONE
    for name in ("data_parallel_size", "load_balance_method", "also", "idle_timeout"):
        with pytest.raises(ConfigError, match=f"unknown option --{name.replace('_', '-')}"):
            server_configs(plugins, {"model": "m", name: "2"}, print)
