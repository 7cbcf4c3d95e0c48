"""``python -m fwk_kit.cli.family_pages FOLDER``: a page for each family, from its interface and template."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import pairwise
from pathlib import Path
from typing import Any

from fwk import hookspecs
from fwk.interfaces.declaration import Declaration
from fwk.plugins import FAMILIES, Family
from fwk.plugins.families import VERSIONS
from fwk_kit.cli.plugin_new import modules, selecting
from fwk_kit.testing import SUITES, suite_of
from fwk_kit.testing.base import installed


def page(name: str) -> str:
    """The page of one family."""
    family = FAMILIES[name]
    templates = resources.files("fwk_kit.templates")
    about = tomllib.loads((templates / "about.toml").read_text())[name].strip()
    hook = getattr(hookspecs, family.hook)
    signature = str(inspect.signature(hook)).replace("'", "")
    parts = [
        f"# {family.noun[0].upper() + family.noun[1:]}",
        f"Family `{name}`, version {VERSIONS[name].newest} ([stability.md](stability.md)). {_chosen(name, family)}",
        about,
        "## Declared by",
        f"```python\n@hookimpl\ndef {family.hook}{signature}: ...\n```",
        inspect.getdoc(family.spec) or "",
        "## The interface",
        f"`{family.spec.__module__}`:",
        *_names(_modules(family.spec.__module__)),
        *_classes(_modules(family.spec.__module__)),
        "## A complete example",
        f"What `fwk plugins new {name} mine` writes; every line of it is run by fwk's own tests.",
        *(_code(f"src/fwk_mine/{module}", text) for module, text in modules(name).items()),
        *_walkthrough(templates / name / "walkthrough.md", family),
        "## What its contract checks",
        inspect.getdoc(suite_of(name)) or "",
        "\n".join(f"- {line}" for line in _checks(name)),
    ]
    return "\n\n".join(parts) + "\n"


def _walkthrough(path: Traversable, family: Family) -> Iterator[str]:
    """A real example step by step, of the families that have one."""
    if path.is_file():
        yield f"## A real {family.noun}, step by step"
        yield path.read_text().strip()


def _chosen(name: str, family: Family) -> str:
    if name in ("models", "loaders"):
        return "Chosen by the checkpoint."
    words = " ".join(selecting(installed(), name, "NAME"))
    if family.takes_all:
        return f"Every installed one takes part{f' (with `{words}`)' if words else ''}."
    return f"Chosen with `{words}`." if words else "Not yet chosen by any option."


def _modules(module: str) -> list[str]:
    """The modules of an interface: its own, and those of its parts, whose names begin with its own."""
    found = [value.__module__ for value in vars(importlib.import_module(module)).values() if inspect.isclass(value)]
    return [module, *dict.fromkeys(name for name in found if name.startswith(f"{module}_"))]


def _names(modules: Sequence[str]) -> Iterator[str]:
    """What an interface calls types and values that are no classes, if a string below them says what they are."""
    bodies = [ast.parse(inspect.getsource(importlib.import_module(module))).body for module in modules]
    lines: list[str] = []
    for node, after in (pair for body in bodies for pair in pairwise(body)):
        if isinstance(node, ast.Assign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            source = ast.unparse(node)
            if not source.startswith("_"):
                lines.append(f"- `{source}`: {' '.join(str(after.value.value).split())}")
    if lines:
        yield "\n".join(lines)


def _classes(modules: Sequence[str]) -> Iterator[str]:
    """The classes of an interface, in the order of its files."""
    found = [(module, *named) for module in modules for named in vars(importlib.import_module(module)).items()]
    for module, name, value in found:
        if not inspect.isclass(value) or value.__module__ != module or name.startswith("_"):
            continue
        if issubclass(value, Declaration):
            continue
        yield f"### `{name}`\n\n{inspect.getdoc(value) or ''}"
        for method, function in vars(value).items():
            text = _method(method, function)
            if text is not None:
                yield text


def _method(name: str, value: Any) -> str | None:
    """A heading and the docstring of a public method or property."""
    is_property = isinstance(value, property)
    function = value.fget if is_property else getattr(value, "__func__", value)
    doc = inspect.getdoc(function)
    if name.startswith("_") or not inspect.isfunction(function) or not doc:
        return None
    signature = "" if is_property else str(inspect.signature(function)).replace("'", "")
    must = "" if getattr(function, "__isabstractmethod__", False) else " (optional)"
    return f"#### `{name}{signature}`{must if not is_property else ''}\n\n{doc}"


def _code(path: str, text: str) -> str:
    return f"```python\n# {path}\n{text.rstrip()}\n```"


def _checks(name: str) -> Iterator[str]:
    """The suite's tests, as sentences."""
    suite = suite_of(name)
    for test in dir(suite):
        if test.startswith("test_"):
            words = test.removeprefix("test_").replace("_", " ")
            doc = (inspect.getdoc(getattr(suite, test)) or "").partition("\n")[0]
            yield f"{words}: {doc[0].lower() + doc[1:]}" if doc else words


def main(folder: str) -> int:
    """Write all pages."""
    for name in SUITES:
        (Path(folder) / f"{name}.md").write_text(page(name))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
