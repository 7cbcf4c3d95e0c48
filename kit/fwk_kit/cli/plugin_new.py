"""``fwk plugins new FAMILY NAME``: a package with a small, complete plugin of the family."""

from __future__ import annotations

import re
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from fwk import __version__
from fwk.errors import ConfigError
from fwk.plugins import FAMILIES, PluginSet
from fwk.plugins.families import NAMED, closest
from fwk.plugins.options import flag
from fwk.plugins.selection import caches_with_tiers
from fwk_process.folders import output_folder

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")

PYPROJECT = """\
[build-system]
requires = ["hatchling>=1.26"]
build-backend = "hatchling.build"

[project]
name = "fwk-mine"
version = "0.1.0"
description = "SUMMARY"
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["fwk>=VERSION"]

[project.optional-dependencies]
test = ["fwk[testing]"]

[project.entry-points.fwk]
"FAMILY.mine" = "fwk_mine"

# Where 'fwk plugins test mine' finds the contract.
[project.entry-points."fwk.contracts"]
"FAMILY.mine" = "fwk_mine.contract"

[tool.hatch.build.targets.wheel]
packages = ["src/fwk_mine"]

[tool.pytest.ini_options]
testpaths = ["tests"]
"""

README = """\
# fwk-mine

SUMMARY, as the NOUN `mine` of fwk.

```bash
pip install .
fwk plugins test mine        # the contract of the family, on this machine
fwk serve USE
```

`src/fwk_mine/__init__.py` declares the plugin and is light: it is imported whenever fwk starts. `plugin.py` holds the
work and is imported only when the plugin is used. `contract.py` says how the contract is to be run on it, and what a
client sends to a server with it.

What the interface asks is in fwk's documentation, on the page `docs/plugins/FAMILY.md`, and in the installed fwk:

```bash
python -m pydoc INTERFACE
```

```bash
pip install -e '.[test]' && pytest
```
"""

WORKFLOW = """\
name: test
on: [push, pull_request]
jobs:
  test:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.11"
      - run: pip install '.[test]'
      - run: pytest
      - run: fwk plugins doctor
      - run: fwk plugins test mine
"""

TEST_CONTRACT = '''\
"""What every NOUN must do."""

from fwk_mine.contract import TestMine

__all__ = ["TestMine"]
'''


def selecting(plugins: PluginSet, family: str, name: str) -> list[str]:
    """The words after ``fwk serve`` that put the plugin to use."""
    option, switch = FAMILIES[family].option, FAMILIES[family].switch
    words = [flag(switch)] if switch is not None else []
    if family in NAMED:
        return [*words, "--enable-plugin", f"{family}.{name}"]
    if family == "cache_tiers":
        words = ["--prefix-cache", *caches_with_tiers(plugins)[:1]]
    if family in ("models", "loaders") or option is None:
        return words  # chosen by the checkpoint, or not chosen
    return [*words, flag(option), name]


def create(plugins: PluginSet, family: str, name: str, parent: Path) -> Path:
    """Write the package ``fwk-NAME`` into ``parent``; its folder. Raises ``ConfigError``."""
    found = next((key for key, known in FAMILIES.items() if family in (key, known.hook, known.option)), None)
    if found is None:
        raise ConfigError(f"unknown family {family!r}{closest(family, FAMILIES)}; families: {', '.join(FAMILIES)}")
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a name for a plugin: lower-case letters and digits, and single _ between")
    taken = plugins.by_family.get(found, {}).get(name)
    if taken is not None:
        raise ConfigError(f"{FAMILIES[found].noun} {name!r} is there already, from {taken.source}: choose another name")
    if find_spec(f"fwk_{name}") is not None:
        raise ConfigError(
            f"a module fwk_{name} is there already, and the new package would hide it: choose another name"
        )
    folder = parent / f"fwk-{name.replace('_', '-')}"
    output_folder(parent, "--directory")
    if folder.exists():
        raise ConfigError(f"{folder} is there already: choose another name, or another folder with --directory")
    for path, text in package(plugins, found).items():
        target = folder / renamed(path, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(renamed(text, name))
    return folder


def renamed(text: str, name: str) -> str:
    """The template's ``mine``, ``Mine`` and ``fwk-mine`` as those of the plugin."""
    class_name = "".join(part.capitalize() for part in name.split("_"))
    text = re.sub(r"\bfwk-mine\b", f"fwk-{name.replace('_', '-')}", text)
    text = re.sub(r"--mine-", f"--{name.replace('_', '-')}-", text)
    text = re.sub(r"(?<![A-Za-z])mine(?![a-z])", name, text)
    return re.sub(r"(?<![a-z])Mine(?![a-z])|(?<=Test)Mine\b", class_name, text)


def modules(family: str) -> dict[str, str]:
    """The modules of the family's template, by name: the declaration first, the contract last."""
    folder = resources.files("fwk_kit.templates") / family
    names = [file.name for file in folder.iterdir() if file.name.endswith(".py")]
    order = sorted(names, key=lambda name: (name != "__init__.py", name == "contract.py", name != "plugin.py", name))
    return {name: (folder / name).read_text() for name in order}


def package(plugins: PluginSet, family: str) -> dict[str, str]:
    """The files of a plugin named ``mine``, by path."""
    selected = selecting(plugins, family, "mine")
    sources = {f"src/fwk_mine/{name}": text for name, text in modules(family).items()}
    summary = sources["src/fwk_mine/__init__.py"].partition('"""')[2].partition('"""')[0].rstrip(".")
    words = {
        "SUMMARY": summary,
        "VERSION": ".".join(__version__.split(".")[:2]),
        "FAMILY": family,
        "INTERFACE": FAMILIES[family].spec.__module__,
        "NOUN": FAMILIES[family].noun,
        "USE": " ".join(selected) or "MODEL",
    }
    texts = {
        "pyproject.toml": PYPROJECT,
        "README.md": README,
        ".github/workflows/test.yml": WORKFLOW,
        "tests/test_contract.py": TEST_CONTRACT,
        ".gitignore": "__pycache__/\n*.egg-info/\ndist/\n.venv/\n",
    }
    for word, value in words.items():
        texts = {path: text.replace(word, value) for path, text in texts.items()}
    return {**texts, **sources, "src/fwk_mine/py.typed": ""}
