"""The failure rules: what a third party does wrong costs a warning, or ends the start with one sentence."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.helpers.packages import import_path, write_package
from tests.helpers.rig import Server, until, write_model

import fwk
from fwk import SamplingParams
from fwk.cli.common import read_options
from fwk.cli.option_parsing import Parser
from fwk.errors import ConfigError, FwkError, ModelLoadError, PluginError, PluginLoadError, RequestFailed
from fwk.plugins import PluginSet, discover
from fwk_kit.bench.servers import free_port

PROBES = ("/health", "/ready")

HEAD = """
import sys, time
from fwk import AttentionBackendSpec, Needs, Options, SamplerSpec, SchedulePolicySpec, hookimpl, option
"""
SAMPLER = """
from fwk.interfaces.sampling import Sampler
class Broken(Sampler):
    calls = 0
    def __init__(self, context):
        super().__init__(context)
        {build}
    def sample(self, logits, rows):
        Broken.calls += 1
        if Broken.calls >= {turn}:
            {step}
        return logits.argmax(-1)
"""


def declares(body: str, *, fields: str = "", before: str = "") -> str:
    """A module that declares the sampler ``broken``, and a schedule policy, so that half of it is there already."""
    return f"""{HEAD}
{before}
@hookimpl
def schedule_policies():
    return [SchedulePolicySpec(name="half", load="broken_sampler:Broken")]

@hookimpl
def samplers():
    {body}
    return [SamplerSpec(name="broken", load="broken_sampler:Broken"{fields})]
"""


def sampler(build: str = "pass", step: str = "pass", turn: int = 1) -> str:
    """The module that is imported when the sampler is selected."""
    return SAMPLER.format(build=build, step=step, turn=turn)


DECLARED = {
    "raises on import": ("raise RuntimeError('no luck')", "failed to import: RuntimeError: no luck"),
    "exits on import": ("import sys; sys.exit(3)", "failed to import: SystemExit: 3"),
    "lacks a dependency": ("import lmcache", "failed to import: ModuleNotFoundError: No module named 'lmcache'"),
    "raises no Exception": ("class B(BaseException): pass\nraise B('no luck')", "failed to import: B: no luck"),
    "raises what cannot be printed": (
        "class E(Exception):\n    def __str__(self): raise RuntimeError\nraise E",
        "failed to import: E, which cannot be printed",
    ),
    "says too much": ("raise ValueError('z' * 10**6)", f"failed to import: ValueError: {'z' * 480}"),
    "is no Python": ("def", "failed to import: SyntaxError: "),
    "raises on declaring": (declares("raise RuntimeError('no luck')"), "failed to declare: RuntimeError: no luck"),
    "exits on declaring": (declares("sys.exit(3)"), "failed to declare: SystemExit: 3"),
    "another version": (declares("pass", fields=", api=7"), "failed to declare: TypeError: 'broken' was written for"),
    "an unknown option": (
        declares("pass", fields=", enabled_by=('fast',)"),
        "failed to declare: ValueError: SamplerSpec 'broken': enabled_by names no option of its own: {'fast'}",
    ),
    "options that are none": (declares("pass", fields=", options=dict"), "must be a subclass of fwk.Options"),
    "an unknown hook": (HEAD + "@hookimpl\ndef smaplers():\n    return []\n", "implements unknown hook"),
    "no list": (HEAD + "@hookimpl\ndef samplers():\n    return None\n", "samplers must return a list, not NoneType"),
}
"""What a module does wrong, and what is said of it."""

BUILT = {
    "raises on building": (sampler("raise RuntimeError('no luck')"), "failed to start: RuntimeError: no luck"),
    "exits on building": (sampler("import sys; sys.exit(3)"), "failed to start: SystemExit: 3"),
    "raises when it is imported": ("raise RuntimeError('no luck')", "failed to import broken_sampler:Broken: Runtime"),
    "lacks a dependency": ("import lmcache", "failed to import broken_sampler:Broken: ModuleNotFoundError: No module"),
    "lacks its class": ("", "failed to import broken_sampler:Broken: AttributeError"),
}
"""What is wrong with what the declaration names."""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Puts a package of two modules on the path: what declares, and what is declared."""

    def add(declaration: str, implementation: str = sampler(), name: str = "acme") -> Path:
        folder = tmp_path / name
        write_package(folder, f"{name}-broken", {f"{name}_broken": declaration})
        (folder / "broken_sampler.py").write_text(implementation)
        monkeypatch.syspath_prepend(str(folder))
        for module in (f"{name}_broken", "broken_sampler"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        return folder

    return add


def found(warnings: list[str] | None = None) -> PluginSet:
    return discover(warn=(warnings if warnings is not None else []).append)


def tiny(folder: Path, plugins: PluginSet, **options: Any) -> fwk.LLM:
    limits = {"max_total_tokens": 256, "max_running_requests": 4}
    return fwk.LLM(str(folder), load_format="dummy", plugins=plugins, **limits, **options)  # type: ignore[arg-type]


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", DECLARED)
def test_one_that_is_not_selected_costs_a_warning(install: Callable[..., Path], tiny_folder: Path, name: str) -> None:
    source, said = DECLARED[name]
    healthy = discover().fingerprint
    install(source)
    warnings: list[str] = []
    plugins = found(warnings)
    (warning,) = warnings
    assert warning.startswith("plugin 'acme-broken.acme_broken' from acme-broken 1.0 ")
    assert said in warning
    assert plugins.fingerprint == healthy, "something of a half-loaded plugin is still registered"
    assert not [item for item in plugins.all() if item.package == "acme-broken"]
    assert not plugins.manager.has_plugin("acme-broken.acme_broken")
    with tiny(tiny_folder, plugins) as llm:
        assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=2, temperature=0))[0].token_ids) == 2


@pytest.mark.gate(4)
@pytest.mark.parametrize("name", DECLARED)
def test_one_that_is_selected_ends_the_start_with_the_cause(
    install: Callable[..., Path], tiny_folder: Path, name: str
) -> None:
    source, said = DECLARED[name]
    install(source)
    with pytest.raises(PluginError) as error:
        tiny(tiny_folder, found(), sampling_backend="broken")
    assert "'acme-broken.acme_broken' from acme-broken 1.0" in str(error.value)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.gate(2)
@pytest.mark.parametrize("name", BUILT)
def test_one_that_cannot_be_built(install: Callable[..., Path], tiny_folder: Path, name: str) -> None:
    source, said = BUILT[name]
    install(declares("pass"), source)
    warnings: list[str] = []
    plugins = found(warnings)
    assert warnings == []
    tiny(tiny_folder, plugins).close()
    assert "broken_sampler" not in sys.modules, "what is not selected is not imported"
    with pytest.raises(FwkError, match=r"^plugin 'acme-broken\.acme_broken' from acme-broken 1\.0 failed") as error:
        tiny(tiny_folder, plugins, sampling_backend="broken")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


LOADER = """from fwk import LoaderSpec, hookimpl
@hookimpl
def loaders():
    return [LoaderSpec(name="broken", load="broken_sampler:Broken", rank=10**6)]
"""
READS = """from fwk.interfaces.loader import Loader
class Broken(Loader):
    @classmethod
    def reads(cls, path):
        {}
"""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise RuntimeError('no luck')", "failed to import broken_sampler:Broken: RuntimeError: no luck"),
        (READS.format("raise SystemExit(3)"), "raised SystemExit in reads: 3"),
    ],
)
def test_a_loader_that_cannot_be_asked_is_passed_over(
    install: Callable[..., Path], tmp_path: Path, source: str, said: str
) -> None:
    install(LOADER, source)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    with pytest.raises(ModelLoadError) as error:
        fwk.LLM(str(tmp_path / "model"), plugins=found())
    assert f"(broken: plugin 'acme-broken.acme_broken' from acme-broken 1.0 {said}; " in str(error.value)
    assert "safetensors" in str(error.value), "the others are asked"
    with pytest.raises(PluginLoadError, match=re.escape(said)):
        fwk.LLM(str(tmp_path / "model"), plugins=found(), load_format="broken")


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        ("packages=('lmcache>=0.3',)", "it needs the package lmcache>=0.3: pip install 'lmcache>=0.3'"),
        ("device='cuda'", "it needs a cuda device, this run uses cpu"),
    ],
)
def test_one_whose_needs_are_not_met(install: Callable[..., Path], tiny_folder: Path, needs: str, said: str) -> None:
    install(declares("pass", fields=f", rank=99, needs=Needs({needs})"))
    plugins = found()
    with tiny(tiny_folder, plugins) as llm:
        assert any(f"sampler 'broken' was not taken: {said}" in reason for reason in llm.engine.info.reasons)
    for options in ({"sampling_backend": "broken"}, {"strict": True}):
        with pytest.raises(PluginError) as error:
            tiny(tiny_folder, plugins, **options)
        assert said in str(error.value)


@pytest.mark.parametrize("turn", [1, 7])
def test_one_that_exits_in_a_step_is_named(install: Callable[..., Path], tiny_folder: Path, turn: int) -> None:
    install(declares("pass"), sampler(step="raise SystemExit('no luck')", turn=turn))
    plugins = found()
    named = re.escape("sampler 'broken' (acme-broken 1.0) raised SystemExit in sample")
    with tiny(tiny_folder, plugins, sampling_backend="broken") as llm, pytest.raises(RequestFailed, match=named):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=32, temperature=0))


def test_the_same_name_twice(install: Callable[..., Path]) -> None:
    install(declares("pass"), name="acme")
    install(declares("pass"), name="beta")
    warnings: list[str] = []
    found(warnings)
    twice = (
        "is declared by 'acme-broken.acme_broken' from acme-broken 1.0 and by 'beta-broken.beta_broken' from "
        "beta-broken 1.0; uninstall one of the two packages"
    )
    assert sorted(warnings) == [f"sampler 'broken' {twice}", f"schedule policy 'half' {twice}"]


def test_an_option_of_the_same_name_twice_names_both(install: Callable[..., Path]) -> None:
    mine = "class Mine(Options):\n    page_size: int = option(3, 'mine')\n"
    install(declares("pass", before=mine, fields=", options=Mine"))
    read_options(Parser("fwk serve", allow_abbrev=False), [])
    said = r"option --page-size is declared by fwk itself and by 'acme-broken\.acme_broken' from acme-broken 1\.0"
    with pytest.raises(PluginError, match=said):
        read_options(Parser("fwk serve", allow_abbrev=False), ["--sampling-backend", "broken"])


def test_a_check_of_options_that_is_broken(install: Callable[..., Path]) -> None:
    mine = """
import pydantic
class Mine(Options):
    mine_size: int = option(3, 'mine')

    @pydantic.field_validator('mine_size')
    @classmethod
    def check(cls, value):
        return len(value)
"""
    install(declares("pass", before=mine, fields=", options=Mine"))
    with pytest.raises(PluginError) as error:
        read_options(Parser("fwk serve", allow_abbrev=False), ["--sampling-backend", "broken", "--mine-size", "4"])
    assert str(error.value) == (
        "--mine-size could not be checked by acme_broken: TypeError: object of type 'int' has no len()"
    )


def test_one_that_blocks_delays_and_is_named(install: Callable[..., Path]) -> None:
    folder = install(declares("pass", before="time.sleep(1.2)"))
    warnings: list[str] = []
    points = [point for point in entry_points(group="fwk") if point.name.startswith("acme-broken.")]
    plugins = discover(points=points, warn=warnings.append)
    (warning,) = warnings
    assert "plugin 'acme-broken.acme_broken' from acme-broken 1.0 took 1." in warning
    assert len(plugins.all()) == 2
    assert folder.exists()


def test_an_unknown_flag_says_which_packages_could_not_be_asked(install: Callable[..., Path]) -> None:
    install("raise RuntimeError('no luck')")
    with pytest.raises(ConfigError) as error:
        read_options(Parser("fwk serve", allow_abbrev=False), ["--broken-thing", "3"])
    assert "unknown option --broken-thing" in str(error.value)
    assert "1 installed plugins are broken" in str(error.value)


def serve(folder: Path, model: Path, *flags: str) -> Server:
    return Server(write_model(model), "--sampling-backend", "broken", *flags, python_path=str(folder))


@pytest.mark.sweep
def test_a_server_is_never_half_started(install: Callable[..., Path], tmp_path: Path) -> None:
    """The sampler is built once the model is loaded: its HTTP side is up by then, and never says that it is ready."""
    port = free_port()
    folder = install(declares("pass"), sampler("import sys; sys.exit(3)"))
    server = serve(folder, tmp_path / "tiny", "--port", str(port))
    told: set[int] = set()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=5) as client:
            while server.process.poll() is None:
                with contextlib.suppress(httpx.TransportError):
                    told |= {client.get(path).status_code for path in PROBES}
                time.sleep(0.1)
        assert told == {503}
        assert server.process.wait(60) == PluginError.exit_code
        (line,) = [line for line in server.log.splitlines() if "fwk: error" in line]
        assert " CRITICAL " in line
        assert line.endswith(
            "fwk: error: plugin 'acme-broken.acme_broken' from acme-broken 1.0 failed to start: SystemExit: 3"
        )
        assert server.leftovers == []
        assert "Traceback" not in server.log
    finally:
        server.close()


@pytest.mark.sweep  # tests/faults/test_engine_death.py has other deaths
def test_a_server_whose_plugin_ends_its_process_in_a_later_step(install: Callable[..., Path], tmp_path: Path) -> None:
    folder = install(declares("pass"), sampler(step="import os; os._exit(5)", turn=40))
    server = serve(folder, tmp_path / "tiny")
    try:
        server.wait_ready()
        body = {"prompt": "x", "max_tokens": 64, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as reply:
            lines = [line for line in reply.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert "error" in json.loads(lines[-2].removeprefix("data: "))
        until(lambda: server.health() == 503, 10, "health 503")
        assert "the engine process ended with exit code 5; 1 request ended" in server.log
    finally:
        server.close()


@pytest.mark.sweep
def test_ten_seconds_are_waited_for(install: Callable[..., Path]) -> None:
    folder = install(declares("pass", before="time.sleep(10)"))
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "fwk", "plugins", "list"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONPATH": import_path(folder), "PATH": "/usr/bin:/bin"},
    )
    assert time.monotonic() - started > 10
    assert "broken" in done.stdout
