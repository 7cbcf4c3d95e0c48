"""The tests' own order: what several of them use lives in ``tests/helpers``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PROGRAMS = ("tests.faults.soak",)
"""Programs of several modules that lie next to the tests."""


SUSPECT = re.compile(r"^ *(?:from +(?:\.|tests\b(?!\.helpers\.))|import .*\btests\b)", re.MULTILINE)
"""What no source without it imports another test by; parsing them all takes three seconds."""


def imports(source: str) -> Iterator[str]:
    """Modules of ``tests`` that a source imports, within functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a helper lives"
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in found if name.split(".")[0] == "tests")


def strangers(source: str, program: str | None = None) -> list[str]:
    """Those that are no helper, nor of the same ``program``."""
    if not SUSPECT.search(source):
        return []
    allowed = ("tests.helpers.", *([f"{program}."] if program is not None else []))
    return [name for name in imports(source) if not name.startswith(allowed)]


def test_no_test_imports_another() -> None:
    found = {}
    for path in sorted(TESTS.rglob("*.py")):
        name = ".".join(path.relative_to(TESTS.parent).with_suffix("").parts)
        program = next((program for program in PROGRAMS if name.startswith(f"{program}.")), None)
        if bad := strangers(path.read_text(), program):
            found[name] = bad
    assert not found, f"move what they share to tests/helpers: {found}"


@pytest.mark.parametrize(
    ("source", "is_bad"),
    [
        ("from tests.helpers.rig import until", False),
        ("from tests.helpers import rig", False),
        ("import tests.helpers.rig", False),
        ("from testsuite import x", False),
        ("from tests.core.test_plugins import declare", True),
        ("def f():\n    import tests.faults.flood", True),
        ("from tests.plugins.lora.conftest import ADAPTERS", True),
        ("from tests import faults", True),
    ],
)
def test_what_counts_as_an_import(source: str, is_bad: bool) -> None:
    assert bool(strangers(source)) == is_bad
