"""What every suite has in common: which plugin it is about, and what holds for plugins of every family."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fwk.config import Options, stability_of
from fwk.interfaces.declaration import Declaration, Facts, Host
from fwk.plugins import FAMILIES, Registered, build, find, load_object
from fwk.plugins.families import VERSIONS
from fwk.plugins.selection import plugin_options
from fwk_kit.cli.plugin_new import selecting
from fwk_kit.testing.fresh_process import FreshProcess
from fwk_kit.testing.installed import alongside, installed
from fwk_kit.testing.serving import TINY, ask, serve_tiny

__all__ = ["PluginSuite", "alongside", "installed"]

HEAVY = ("torch", "triton", "flashinfer", "transformers", "tokenizers", "fastapi", "uvicorn", "zmq", "numpy")
"""What declaring may not import: ``fwk --help`` declares everything that is installed."""

FRESH = pytest.StashKey[FreshProcess]()
"""Where a module keeps the process of its suites."""

_DISCOVER = f"""
import json, sys
from importlib.metadata import entry_points
from fwk.plugins import discover
heavy, found, seen = {HEAVY!r}, {{}}, set()
for point in entry_points(group="fwk"):
    plugins = discover(points=[point])
    found[point.name] = [name for name in heavy if name in sys.modules and name not in seen]
    seen.update(found[point.name])
print(json.dumps(found))
"""


@functools.cache
def imported_by_declaring() -> dict[str, list[str]]:
    """By entry point: the heavy libraries that declaring it brought into a fresh process."""
    done = subprocess.run([sys.executable, "-c", _DISCOVER], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"a fresh process cannot discover the plugins:\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])


class PluginSuite:
    """The base of every family's suite. Subclass that of your family, name it ``Test...``, and say which plugin it is:

        class TestMine(AttentionSuite):
            plugin = "mine"

    plugin: the name in its family of an installed plugin.
    declaration: a declaration that is not installed, to be tested instead.
    options: options of the plugin to test it with, as in a YAML file.
    serve_with: further options of ``fwk serve`` it cannot be served without.
    served_request: what a client sends to a server with the plugin so that the plugin has its part in the reply: JSON
        for ``served_path``. Override ``check_served`` to look for the plugin's own mark on it.
        ``served_model`` and ``config_to_serve`` say which model is served then: a tiny one with random weights.
    """

    family: ClassVar[str] = ""
    interface: ClassVar[type | None] = None
    plugin: ClassVar[str] = ""
    declaration: ClassVar[Declaration | None] = None
    options: ClassVar[Mapping[str, object]] = {}
    serve_with: ClassVar[Mapping[str, Any]] = {}
    served_request: ClassVar[Mapping[str, Any]] = {}
    served_path: ClassVar[str] = "/v1/completions"

    @classmethod
    def registered(cls) -> Registered:
        """The plugin under test. Raises ``PluginError`` when it is not installed."""
        if cls.declaration is not None:
            return Registered(cls.declaration, f"{cls.family}.{cls.declaration.name}", "under test", "0")
        return find(installed(), cls.family, cls.plugin)

    @pytest.fixture
    def item(self) -> Registered:
        """The plugin under test."""
        return self.registered()

    @pytest.fixture(autouse=True)
    def one_thread(self) -> Iterator[None]:
        """Tiny tensors: one thread computes them fastest."""
        torch = sys.modules.get("torch")
        if torch is None:
            yield
            return
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)

    def given(self, item: Registered) -> Any:
        """The validated options of ``options``; None for a plugin without options."""
        return plugin_options(item, {item.key: self.options})

    def skip_where_refused(self, item: Registered) -> None:
        """Skip with the plugin's own sentence when this machine or environment is not for it."""
        refusal = item.declaration.needs.refusal(Host())
        if refusal is not None:
            pytest.skip(f"{item.name} {refusal}")

    def make(self, item: Registered, context: Any) -> Any:
        """Build the plugin's object, or skip where this machine is not for it."""
        self.skip_where_refused(item)
        return build(item, context)

    def exercise(self, item: Registered) -> None:
        """The least use of the plugin; run in a fresh process too. A suite overrides it."""
        load_object(item)

    # What holds in every family.

    def test_declaration_is_frozen_data_of_its_family(self, item: Registered) -> None:
        declaration = item.declaration
        assert isinstance(declaration, FAMILIES[self.family].spec)
        assert VERSIONS[self.family].refusal(self.family, item.name, item.package, item.api) is None
        with pytest.raises(dataclasses.FrozenInstanceError):
            declaration.name = "another"  # type: ignore[misc]

    def test_refusing_is_a_sentence_or_none(self, item: Registered) -> None:
        for facts in (Facts(), Facts(host=Host("cuda", (9, 0))), Facts(dtype="float16", head_size=7)):
            refusal = item.declaration.refusal(facts)
            assert refusal is None or (isinstance(refusal, str) and len(refusal.split()) > 1), refusal
            assert item.declaration.refusal(facts) == refusal, "the same question, another answer"

    def test_declaring_imports_nothing_heavy(self, item: Registered) -> None:
        if self.declaration is not None:
            pytest.skip("only an installed plugin is discovered")
        heavy = imported_by_declaring().get(item.plugin, [])
        assert heavy == [], f"declaring {item.plugin} imports {', '.join(heavy)}: import them in the module of load"

    def test_options_are_described_and_can_be_sent_to_another_process(self, item: Registered) -> None:
        model = item.declaration.options
        if model is None:
            assert plugin_options(item, {}) is None
            return
        assert issubclass(model, Options)
        for name, field in model.model_fields.items():
            assert (field.description or "").strip(), f"option {name} has no description"
            assert not field.is_required(), f"option {name} has no default"
            assert stability_of(field) in ("stable", "beta", "experimental")
        own = self.given(item)
        assert model.model_validate(json.loads(own.model_dump_json())) == own

    def test_load_names_what_the_family_asks_for(self, item: Registered) -> None:
        self.skip_where_refused(item)
        loaded = load_object(item)
        if self.interface is not None:
            assert isinstance(loaded, type), f"{item.declaration.load} is not a class"
            assert issubclass(loaded, self.interface)

    def test_works_in_a_fresh_process(self, item: Registered, fresh_process: FreshProcess) -> None:
        """Engines and workers are processes of their own: nothing may depend on what the tests' process has done."""
        if self.declaration is not None:
            pytest.skip("only an installed plugin is found by another process: install it, and set plugin")
        self.skip_where_refused(item)
        where = f"{type(self).__module__}:{type(self).__qualname__}"
        failure = fresh_process.exercise(where, self.family, item.name, dict(self.options))
        assert failure is None, failure

    @pytest.fixture
    def fresh_process(self, request: pytest.FixtureRequest) -> FreshProcess:
        """One for all suites of a module."""
        module = request.node.getparent(pytest.Module)
        if FRESH not in module.stash:
            module.stash[FRESH] = FreshProcess()
            module.addfinalizer(module.stash[FRESH].close)
        return module.stash[FRESH]

    def serve_words(self, item: Registered, folder: Path) -> list[str]:
        """What follows ``fwk serve MODEL`` to use the plugin. ``folder`` is that of ``served_model``, called before."""
        given = {**self.serve_with, **self.options}
        if not given:
            return selecting(installed(), self.family, item.name)
        (folder / "options.yaml").write_text(json.dumps(given))
        return [*selecting(installed(), self.family, item.name), "--config", str(folder / "options.yaml")]

    def served_model(self, folder: Path) -> str | None:
        """The model to serve, made below ``folder``; None: one of ``config_to_serve``, with random weights."""
        return None

    def config_to_serve(self) -> Mapping[str, Any]:
        """config.json of the model that is served."""
        return TINY

    def check_served(self, url: str, reply: Any) -> None:
        """Look at what the server at ``url`` replied to ``served_request``; ask it more (``fwk.testing.ask``)."""
        assert reply["choices"][0]["finish_reason"] in ("length", "stop", "tool_calls")

    def test_a_served_request_uses_it(self, item: Registered, tmp_path: Path) -> None:
        """Through ``fwk serve`` and HTTP, as users have it."""
        if self.declaration is not None:
            pytest.skip("only an installed plugin is served: install it, and set plugin")
        if not self.served_request:
            pytest.skip("the suite asks no server: set served_request to what a client sends to use the plugin")
        self.skip_where_refused(item)
        model = self.served_model(tmp_path)
        words = self.serve_words(item, tmp_path)
        with serve_tiny(*words, config=self.config_to_serve(), model=model) as url:
            reply = ask(url, self.served_path, dict(self.served_request))
            assert f"{item.key} {item.package} {item.version}" in ask(url, "/server_info")["plugins"]
            self.check_served(url, reply)
