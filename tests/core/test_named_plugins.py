"""Another package's plugin is off until it is named, where all that are on take part; what it touches is known."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.helpers.fake_plugins import FakeEntryPoint, declare, of
from tests.helpers.packages import import_path, write_package

from fwk.config import Options, option
from fwk.errors import ConfigError, PluginError, PluginLoadError
from fwk.plugins import FAMILIES, PluginFactory, PluginSet, build_config, discover, taking_part
from fwk.plugins.families import NAMED
from fwk.plugins.lock import check_lock, frozen
from fwk.plugins.selection import find


class Mine(Options):
    """Options that turn nothing on by themselves."""

    mine_word: str = option("", "A word.")


def installed(*families: str, load: str = "acme:Nothing", package: str = "acme", **fields: Any) -> PluginSet:
    """A package that declares a plugin ``extra`` in each of these families, alongside the built-ins."""
    module = ModuleType(package)
    for family in families:
        known, given = FAMILIES[family], dict(fields)
        if family == "features":
            given["server"] = load
        declare(module, known.hook, [known.spec(name="extra", load=load, **given)])
    points = [*entry_points(group="fwk"), FakeEntryPoint(f"{package}.extra", module, package)]
    return discover(points=[point for point in points if point.dist.name in ("fwk", package)])  # type: ignore[union-attr]


def on(plugins: PluginSet, family: str, **given: Any) -> bool:
    config = build_config(plugins, {"model": "m", **given})
    return "extra" in [item.name for item, _ in taking_part(plugins, family, config.plugin_options)]


@pytest.mark.gate(2)
@pytest.mark.parametrize("family", NAMED)
def test_it_is_off_until_it_is_named(family: str) -> None:
    plugins = installed(family, options=Mine)
    assert not on(plugins, family)
    assert all(on(plugins, family, enable_plugin=[name]) for name in ("extra", f"{family}.extra", "acme"))
    assert on(plugins, family, mine_word="yes", **({"enable_lora": True} if family == "lora_sources" else {}))
    assert on(installed(family, package="fwk"), family), "a built-in is on"


def test_it_is_told_which_are_off() -> None:
    told: list[str] = []
    build_config(installed("observers", "dialects"), {"model": "m"}, told.append)
    assert told == ["installed and not used: dialects.extra, observers.extra; --enable-plugin turns them on"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("observers.extr", r"--enable-plugin observers.extr: no other package has .*did you mean 'observers.extra'\?"),
        ("prometheus", r"no other package has a plugin of that name.*; those that wait for it: observers.extra"),
        ("samplers.extra", r"--enable-plugin samplers.extra: it is a sampler: select it with --sampling-backend extra"),
    ],
)
def test_a_name_that_turns_nothing_on(name: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        build_config(installed("observers", "samplers"), {"model": "m", "enable_plugin": [name]})


def test_one_that_cannot_be_built_is_left_out_unless_it_was_given_options(caplog: pytest.LogCaptureFixture) -> None:
    def built(**given: Any) -> list[Any]:
        config = build_config(plugins, {"model": "m", "enable_plugin": ["extra"], **given})
        factory = PluginFactory(plugins, config.plugin_options)
        return [built for _, built in factory.build_all("logits_processors", dict)]

    spec = FAMILIES["logits_processors"].spec(name="extra", load="builtins:int", options=Mine)  # int({...}) raises
    plugins = of(spec)
    assert built() == []
    [sentence] = plugins.left_out
    assert sentence.startswith("plugin 'acme.all' from acme 1.0 failed to start: TypeError")
    assert any(sentence in message for message in caplog.messages)
    with pytest.raises(PluginLoadError, match=r"plugin 'acme\.all' from acme 1\.0 failed to start"):
        built(mine_word="x")


class Clashing(Options):
    """An option that ``Mine`` has, too, and means otherwise."""

    mine_word: int = option(3, "Not a word.")


def test_an_option_of_one_name_in_two_packages_concerns_only_what_needs_it() -> None:
    plugins, other = installed("samplers", options=Mine), ModuleType("other")
    declare(other, "schedule_policies", [FAMILIES["schedulers"].spec(name="late", load="a:b", options=Clashing)])
    plugins.register(other, "schedulers.late", "other", "2.0")
    assert build_config(plugins, {"model": "m"}).model.model == "m"
    said = (
        r"option --mine-word is declared by 'acme\.extra' from acme 1\.0 and by 'schedulers\.late' from other 2\.0, "
        r"which cannot be used: rename it there, or uninstall other"
    )
    with pytest.raises(PluginError, match=said):
        build_config(plugins, {"model": "m", "schedule_policy": "late"})
    with pytest.raises(PluginError, match=said):
        find(plugins, "schedulers", "late")


OBSERVER = """
import os, socket
from fwk import ObserverSpec, hookimpl

@hookimpl
def observers():
    return [ObserverSpec(name="noted", load="acme_noted:Noted"{touches})]

def write(path):
    open(path, "w").close()

CHANGES = [
    lambda path: os.mkdir(path + ".d"),
    lambda path: os.rmdir(path + ".d"),
    lambda path: os.link(path, path + ".l"),
    lambda path: os.symlink(path, path + ".s"),
    lambda path: os.chmod(path, 0o600),
    lambda path: os.chown(path, os.getuid(), -1),
    lambda path: os.utime(path),
    lambda path: os.truncate(path, 0),
    lambda path: os.rename(path, path + ".r"),
    lambda path: socket.gethostbyname("127.0.0.1"),
]
"""


def test_a_lock_turns_on_what_it_names_and_holds_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = write_package(tmp_path / "site", "acme", {"acme_noted": OBSERVER.format(touches="")})
    monkeypatch.syspath_prepend(str(site))
    plugins, lock = discover(), tmp_path / "lock"
    lock.write_text(json.dumps(frozen(plugins)))
    assert "observers.noted" in check_lock(str(lock), plugins)
    assert build_config(plugins, {"model": "m", "plugins_lock": str(lock)}).plugin_options["observers.noted"] == {}
    (site / "acme_noted.py").write_text(OBSERVER.format(touches="") + "# one line more\n")
    with pytest.raises(ConfigError, match="files of acme have changed"):
        check_lock(str(lock), plugins)


AUDITED = """
import logging, sys
from fwk.plugins import discover
from fwk.plugins.audit import Audit
logging.basicConfig(format="%(message)s")
plugins = discover()
Audit(plugins, is_strict=sys.argv[2] == "strict")
import acme_noted
open(sys.argv[1] + ".own", "w").close()  # by nobody's code
acme_noted.write(sys.argv[1])
acme_noted.write(sys.argv[1])
print(len(plugins.undeclared))
if not sys.argv[2]:
    for change in acme_noted.CHANGES:
        plugins.undeclared.clear()
        change(sys.argv[1])
        assert [*plugins.undeclared] != [], change.__code__.co_names
"""


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    ("touches", "strict", "count"), [("", "", 1), (', touches=frozenset({"files"})', "strict", 0), ("", "strict", None)]
)
def test_what_was_not_declared_is_reported(touches: str, strict: str, count: int | None, tmp_path: Path) -> None:
    site = write_package(tmp_path / "site", "acme", {"acme_noted": OBSERVER.format(touches=touches)})
    words = [sys.executable, "-c", AUDITED, str(tmp_path / "file"), strict]
    done = subprocess.run(words, env={"PYTHONPATH": import_path(site)}, capture_output=True, text=True, timeout=120)
    said = "package acme 1.0 touches 'files', which no plugin of it declares (open)"
    assert done.stderr.count(said) == {0: 0, 1: 1, None: 2}[count], done.stderr
    assert "AssertionError" not in done.stderr, done.stderr
    assert (done.stdout.strip() == str(count)) if count is not None else "PermissionError" in done.stderr


def test_a_word_that_says_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ObserverSpec 'extra': touches rockets; there are files, network, processes"):
        FAMILIES["observers"].spec(name="extra", load="a:b", touches=frozenset({"rockets"}))
