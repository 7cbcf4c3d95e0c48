"""docs/hooks.md says what hookspecs.py says."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

from fwk import Declaration, hookspecs
from fwk.plugins import FAMILIES

TEXT = (Path(__file__).parents[2] / "docs/hooks.md").read_text()


def sections() -> dict[str, str]:
    parts = re.split(r"^## `(.*)`$", TEXT, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def hooks() -> dict[str, object]:
    return {
        name: value
        for name, value in vars(hookspecs).items()
        if inspect.isfunction(value) and value.__module__ == hookspecs.__name__
    }


def test_every_hook_has_its_heading_with_the_same_signature() -> None:
    written = {f"{name}{inspect.signature(hook)}".replace("'", "") for name, hook in hooks().items()}  # type: ignore[arg-type]
    assert set(sections()) == written


def test_every_hook_has_its_docstring_and_its_own_fields() -> None:
    for heading, body in sections().items():
        name = heading.partition("(")[0]
        family = next(f for f in FAMILIES.values() if f.hook == name)
        assert " ".join((inspect.getdoc(hooks()[name]) or "?").split()) in " ".join(body.split())
        common = {field.name for field in dataclasses.fields(Declaration)}
        for field in dataclasses.fields(family.spec):
            if field.name not in common:
                assert f"`{field.name}: {field.type}`" in body


def test_the_common_fields_are_described() -> None:
    for field in dataclasses.fields(Declaration):
        assert f"| `{field.name}` |" in TEXT


def test_every_family_has_a_hook() -> None:
    assert {family.hook for family in FAMILIES.values()} == set(hooks())
