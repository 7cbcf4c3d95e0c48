"""Every public member of what plugins are given, or implement, is described where ``help()`` and the site show it.

A method or property has a docstring, of its own or of the base's method. A field is named by the docstring of its
class, or of a base: ``- ``name``: ...`` in a list, ``name: ...``, or in a sentence. A string under a field is shown by
no ``help()``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeGuard

import pytest

CORE = Path(__file__).parents[2] / "core/fwk"
TYPES = ("batch", "model_config", "request", "sampling")
MESSAGES = ("EngineReady", "EngineStats", "TokenEvent")
"""Of ``fwk.types.messages``, what plugins see; the others travel between core's processes."""

PAGE = (CORE.parents[1] / "docs/reference.md").read_text()


def classes() -> dict[str, ast.ClassDef]:
    paths = [*(CORE / "interfaces").glob("*.py"), *(CORE / f"types/{name}.py" for name in TYPES)]
    found = {node.name: node for path in paths for node in ast.walk(ast.parse(path.read_text())) if is_class(node)}
    messages = ast.parse((CORE / "types/messages.py").read_text())
    return found | {node.name: node for node in messages.body if is_class(node) and node.name in MESSAGES}


def is_class(node: ast.AST) -> TypeGuard[ast.ClassDef]:
    return isinstance(node, ast.ClassDef)


def line_of(cls: ast.ClassDef, known: Mapping[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    """The class, and the bases that are known."""
    yield cls
    for base in cls.bases:
        name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
        if name in known:
            yield from line_of(known[name], known)


def members(cls: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Name and docstring of each public member; those of fields are empty."""
    for node in cls.body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if node.name == "__init__":
                stored = [one for one in ast.walk(node) if isinstance(one, ast.Attribute) and is_stored(one)]
                # help() shows the constructor's ``context``, and its type.
                targets = [one for one in stored if one.attr != "context"]
            elif not node.name.startswith("_"):
                yield node.name, ast.get_docstring(node) or ""
        for target in targets:
            name = target.attr if isinstance(target, ast.Attribute) else ast.unparse(target)
            if not name.startswith("_"):
                yield name, ""


def is_stored(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"


def is_named(name: str, text: str) -> bool:
    return bool(re.search(rf"``{name}(``|\()|(^|(?<=[\s.]))(\w+, )*{name}(, \w+)*:", text, re.MULTILINE))


def undocumented(known: Mapping[str, ast.ClassDef]) -> set[str]:
    found: set[str] = set()
    for cls in known.values():
        if cls.name.startswith("_"):
            continue
        line = list(line_of(cls, known))
        text = "\n".join(ast.get_docstring(one) or "" for one in line)
        inherited = {name for one in line[1:] for name, words in members(one) if words}
        if not ast.get_docstring(cls):
            found.add(cls.name)
        for name, words in members(cls):
            if not words and name not in inherited and not is_named(name, text):
                found.add(f"{cls.name}.{name}")
    return found


def test_no_public_member_is_undocumented() -> None:
    assert undocumented(classes()) == set()


@pytest.mark.gate(2)
@pytest.mark.parametrize(
    "member", ["ModelCard.created", "DraftView.ahead", "SchedulerView.block_size", "Facts.head_size"]
)
def test_one_that_is_not_described_is_found(member: str) -> None:
    known = classes()
    name, _, field = member.partition(".")
    source = re.sub(rf'``{field}``|(?<=def {field}\(self\) -> int:\n        """)[^"]*', "", ast.unparse(known[name]))
    [changed] = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    assert undocumented(known | {name: changed}) == {member}


ARRAY = re.compile(r"\b(Tensor|ndarray)\b")
PASSAGE = re.compile(r"\n\n|\n(?=- ``)|(?<=[.\n])\s*(?=\w+(?:, \w+)*: )")


def arrays(cls: ast.ClassDef, text: str) -> Iterator[tuple[str, str]]:
    """Each field that is an array, or made of arrays, and each method with such an argument or answer: what is said."""
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and ARRAY.search(ast.unparse(node.annotation).partition("Callable")[0]):
            name = ast.unparse(node.target)
            yield name, " ".join(part for part in PASSAGE.split(text) if is_named(name, part))
        elif isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            types = [arg.annotation for arg in node.args.args] + [node.returns]
            if ARRAY.search(" ".join(ast.unparse(one) for one in types if one and "Callable" not in ast.unparse(one))):
                yield node.name, ast.get_docstring(node) or ""


def test_every_array_has_a_shape() -> None:
    """``[num_tokens, hidden_size]`` or words."""
    known, found = classes(), set[str]()
    for cls in known.values():
        text = "\n\n".join(ast.get_docstring(one) or "" for one in line_of(cls, known))
        if not cls.name.startswith("_"):
            found |= {f"{cls.name}.{name}" for name, said in arrays(cls, text) if not re.search(r"\[|shape", said)}
    assert found == set()


def test_help_shows_what_the_site_shows() -> None:
    """No text stands under a field of a class, and each module is a part of the page."""
    hidden = {
        f"{cls.name}, line {after.lineno}"
        for cls in classes().values()
        for before, after in zip(cls.body, cls.body[1:], strict=False)
        if isinstance(before, (ast.Assign, ast.AnnAssign)) and isinstance(after, ast.Expr)
    }
    assert hidden == set()
    missing = [name for name in (*(f"types.{name}" for name in TYPES), "types.messages") if f"fwk.{name}\n" not in PAGE]
    assert missing == []
