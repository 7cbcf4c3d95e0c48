"""A plugin author's first hour, and the example packages, in an environment of their own. Needs pip."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest

from fwk.plugins import FAMILIES
from fwk_kit.cli.plugin_new import selecting
from fwk_kit.testing.base import installed

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.parent for path in (ROOT / "examples/plugins").glob("*/pyproject.toml"))

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(900)]


class Environment:
    """A virtual environment with fwk and nothing else of this checkout; heavy libraries come from ours."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False)
        self.bin = folder / "bin"
        site = next(folder.glob("lib/python*/site-packages"))
        (site / "heavy.pth").write_text(_without_fwk(folder / "heavy"))
        self.install(ROOT)

    def run(self, *words: str, cwd: Path | None = None, code: int = 0) -> str:
        """A command of the environment; what it printed."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        command = [str(self.bin / words[0]), *words[1:]]
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == code, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    def install(self, folder: Path) -> None:
        """``pip install FOLDER``, what it depends on being there; what builds it too, if it is."""
        alone = ["--no-build-isolation"] if find_spec("hatchling") is not None else []
        words = ["-m", "pip", "--python", str(self.bin / "python"), "install", "-q", "--no-deps", *alone, str(folder)]
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def _without_fwk(folder: Path) -> str:
    """A folder with everything of our site-packages but fwk: as links, for an editable fwk must not be seen."""
    folder.mkdir()
    for place in {sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("site-packages"))}:
        for path in Path(place).iterdir():
            if not re.match(r"_?_?(editable__*_)?fwk|.*\.pth$", path.name) and not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
    return str(folder) + "\n"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("venv") / "env")


def test_fwk_is_the_installed_one(environment: Environment) -> None:
    where = environment.run("python", "-c", "import fwk; print(fwk.__file__)")
    assert str(ROOT) not in where


def test_the_first_hour_works_as_printed(environment: Environment, tmp_path: Path) -> None:
    printed = environment.run("fwk", "plugins", "new", "attention", "mine", cwd=tmp_path)
    install, test, serve = [line.strip() for line in printed.partition("now:\n")[2].splitlines()]
    assert (install, test) == ("pip install ./fwk-mine", "fwk plugins test mine")
    assert serve == "fwk serve --attention-backend mine"
    environment.install(tmp_path / "fwk-mine")
    assert "0 failed" in environment.run("fwk", "plugins", "test", "mine")
    assert " passed" in environment.run("python", "-m", "pytest", "-q", "-k", "options", cwd=tmp_path / "fwk-mine")
    report = json.loads(
        environment.run("fwk", "plugins", "bench", "mine", "--against", "torch", "--rounds", "1", "--json")
    )
    assert report["equal_tokens"] == 1.0


def test_a_new_plugin_of_every_family_is_served(environment: Environment, tmp_path: Path) -> None:
    """All of them installed alongside one another, each serving a tiny model."""
    for family in FAMILIES:
        environment.run("fwk", "plugins", "new", family, f"my_{family}", "--directory", str(tmp_path))
        environment.install(tmp_path / f"fwk-my-{family.replace('_', '-')}")
    assert environment.run("fwk", "plugins", "doctor").splitlines()[-1].startswith(("0 errors", "all is well"))
    failed = []
    for family in FAMILIES:
        folder = tmp_path / f"fwk-my-{family.replace('_', '-')}"
        try:
            told = environment.run("python", "-m", "pytest", "-q", "-k", "served_request", cwd=folder)
            assert "1 passed" in told, told
        except AssertionError as error:
            failed.append(f"{family} ({' '.join(selecting(installed(), family, 'x'))}): {error}"[-1500:])
    assert failed == []


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_an_example_passes_its_own_tests(folder: Path, environment: Environment) -> None:
    """Its contract is one of them."""
    environment.install(folder)
    assert "failed" not in environment.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=folder)
