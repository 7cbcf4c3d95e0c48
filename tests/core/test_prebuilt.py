"""Kernels that come with a wheel, and the wheel itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import fwk_native as native
from fwk.errors import PluginError
from fwk_native import build, compiler, prebuilt

ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "prebuilt")
    prebuilt.FOLDER.mkdir()
    path = tmp_path / "sample.cpp"
    path.write_text('extern "C" int answer() { return 42; }')
    return path


@needs_compiler
def test_what_came_with_the_wheel_needs_no_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [made] = prebuilt.build_all([source], ["plain"], prebuilt.FOLDER)
    assert [file for file in prebuilt.FOLDER.rglob("*") if file.is_file()] == [made], "nothing else is left there"
    monkeypatch.setattr(compiler, "COMPILERS", ())
    monkeypatch.delenv("CXX", raising=False)
    assert native.load(source, "plain").answer() == 42
    source.write_text('extern "C" int answer() { return 43; }')
    with pytest.raises(PluginError, match="the kernel sample is built on first use and finds no C"):
        native.load(source, "plain")


@needs_compiler
def test_kernels_are_offered_without_a_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SMALLEST", source)
    monkeypatch.setattr(compiler, "COMPILERS", ())
    monkeypatch.delenv("CXX", raising=False)
    assert "finds no C++ compiler" in str(native.refusal())
    with monkeypatch.context() as with_compiler:
        with_compiler.setenv("CXX", "c++")
        prebuilt.build_all([source], ["plain"], prebuilt.FOLDER)
    assert native.isas() == ["plain"], "no more than came, whatever the machine has"
    assert native.isa() == "plain"
    assert native.refusal() is None


def test_a_wheel_needs_a_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "COMPILERS", ())
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(PluginError, match="no C"):
        prebuilt.build_all([source], ["plain"], prebuilt.FOLDER)


def test_classifiers_begin_with_the_python_that_is_required() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [one.rpartition(" ")[2] for one in project["classifiers"] if "Python :: 3." in one]
    assert project["requires-python"] == f">={named[0]}"
    assert named == ["3.11", "3.12", "3.13", "3.14"]


@needs_compiler
@pytest.mark.sweep
@pytest.mark.parametrize("kernels", ["", "plain"])
def test_a_wheel_is_built(tmp_path: Path, kernels: str) -> None:
    """Pure, or with kernels; both hold every package, the page's files and the kernels' sources."""
    hatchling = pytest.importorskip("hatchling", reason="needs the build backend: pip install hatchling")
    del hatchling
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "FWK_KERNELS": kernels}, check=True)
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    libraries = [name for name in names if name.startswith("fwk_native/prebuilt/")]
    assert wheel.name.endswith("-none-any.whl") == (not kernels)
    assert len(libraries) == (len([name for name in names if name.endswith(".cpp")]) if kernels else 0)
    for name in ("fwk_server/playground/static/app.js", "fwk_operators/cpu/operators.cpp", "fwk/py.typed"):
        assert name in names


def test_only_publishing_may_ask_for_an_identity() -> None:
    """The release's workflow: started by a person, and no step before the last holds what PyPI trusts."""
    text = (ROOT / ".github/workflows/release.yml").read_text()
    workflow = yaml.safe_load(text)
    assert set(workflow[True]) == {"workflow_dispatch"}, "the key `on`, as YAML reads it"
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"]
    assert [name for name, job in jobs.items() if "permissions" in job] == ["publish"]
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}
    assert "secrets." not in text
    assert not any("${{" in step.get("run", "") for job in jobs.values() for step in job["steps"]), "a shell reads tags"
