"""Plugins that take part only once an option of their own is set."""

from __future__ import annotations

import pytest

from fwk import Needs, ObserverSpec, Options, hookimpl, option
from fwk.errors import ConfigError, PluginError
from fwk.plugins import PluginSet, build_config, discover, taking_part
from fwk.plugins.discovery import OWN


class Mine(Options):
    mine_to: str | None = option(None, "Where to.")
    mine_on: bool = option(False, "On.")
    mine_size: int = option(1, "How large.")
    mine_level: int = option(1, "How much.")


MINE = ("mine_to", "mine_on", "mine_level")


class Lacking(Options):
    lacking_on: bool = option(False, "On.")


class Plugin:
    @hookimpl
    def observers(self) -> list[ObserverSpec]:
        needs = Needs(packages=("not-installed-anywhere>=1",))
        return [
            ObserverSpec(name="mine", load="nowhere:Nothing", options=Mine, enabled_by=MINE),
            ObserverSpec(
                name="lacking", load="nowhere:Nothing", options=Lacking, enabled_by=("lacking_on",), needs=needs
            ),
            ObserverSpec(name="always", load="nowhere:Nothing"),
        ]


@pytest.fixture
def plugins() -> PluginSet:
    plugins = discover(points=[])
    plugins.register(Plugin(), "observers.mine", OWN, "1")
    return plugins


def names(plugins: PluginSet, **given: object) -> list[str]:
    config = build_config(plugins, given)
    return [item.name for item, _ in taking_part(plugins, "observers", config.plugin_options)]


def test_off_until_one_of_its_options_is_set(plugins: PluginSet) -> None:
    assert names(plugins) == ["always"]
    assert names(plugins, mine_on="false") == names(plugins, mine_on=False) == ["always"]
    assert names(plugins, mine_level=0) == ["always", "mine"]  # which is not what it is when it is not given
    assert names(plugins, mine_to="there") == ["always", "mine"]
    assert names(plugins, mine_on="true", mine_size="3") == ["always", "mine"]


@pytest.mark.parametrize("given", [{"mine_size": 3}, {"mine_on": "false", "mine_size": 3}])
def test_options_of_one_that_is_off_are_an_error(plugins: PluginSet, given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"belongs to observers.mine, which is off: turn it on with --mine-to or --m"):
        build_config(plugins, given)


class Usual(Options):
    disable_usual: bool = False
    usual_size: int = 1


class UsualPlugin:
    @hookimpl
    def observers(self) -> list[ObserverSpec]:
        return [ObserverSpec(name="usual", load="nowhere:Nothing", options=Usual, disabled_by=("disable_usual",))]


def test_on_until_it_is_turned_off() -> None:
    plugins = discover(points=[])
    plugins.register(UsualPlugin(), "observers.usual", OWN, "1")
    assert names(plugins) == names(plugins, disable_usual="false") == names(plugins, usual_size=3) == ["usual"]
    assert names(plugins, disable_usual=True) == []
    with pytest.raises(ConfigError, match=r"--usual-size belongs .*, which is off: turn it on with --disable-usual f"):
        build_config(plugins, {"disable_usual": True, "usual_size": 3})


def test_one_that_is_turned_on_and_lacks_a_package(plugins: PluginSet) -> None:
    config = build_config(plugins, {"lacking_on": True})
    with pytest.raises(PluginError, match=r"observer 'lacking' \(fwk\) .* needs the package not-installed-anywhere"):
        taking_part(plugins, "observers", config.plugin_options)


def test_a_declaration_names_options_it_has() -> None:
    with pytest.raises(ValueError, match="enabled_by names no option of its own"):
        ObserverSpec(name="mine", load="nowhere:Nothing", options=Mine, enabled_by=("other",))
    with pytest.raises(ValueError, match="enabled_by names no option of its own"):
        ObserverSpec(name="mine", load="nowhere:Nothing", enabled_by=("other",))
    with pytest.raises(ValueError, match="disabled_by names no option of its own"):
        ObserverSpec(name="mine", load="nowhere:Nothing", options=Mine, disabled_by=("other",))
