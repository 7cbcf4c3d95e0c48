"""docs/plugins: pages are those of today's interfaces, and the code of the tutorial runs."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from fwk.plugins import FAMILIES
from fwk_kit.cli.family_pages import page
from fwk_kit.cli.plugin_new import package
from fwk_kit.testing.base import installed

DOCS = Path(__file__).parents[2] / "docs/plugins"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pages_example_is_the_template(family: str) -> None:
    """Which the kit's tests run."""
    text = (DOCS / f"{family}.md").read_text()
    for path, source in package(installed(), family).items():
        if path.startswith("src/") and source:
            assert source.rstrip() in text, f"{path}: run make docs"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_pages_are_those_of_the_interfaces(family: str) -> None:
    """Word for word. Slow: any docstring of an interface changes a page, which waits for the next ``make docs``."""
    assert (DOCS / f"{family}.md").read_text() == page(family), "run make docs"


def test_the_tutorials_code_runs() -> None:
    found = re.findall(r"<!-- run -->\n```python\n(.*?)```", (DOCS / "tutorial.md").read_text(), re.DOTALL)
    assert len(found) == 3
    for number, source in enumerate(found):
        module = ModuleType(f"tutorial_{number}")
        exec(compile(source, f"tutorial.md, piece {number}", "exec"), vars(module))  # noqa: S102 - our own page


def test_the_tutorials_first_hour_is_what_new_prints() -> None:
    text = (DOCS / "tutorial.md").read_text()
    for line in ("fwk plugins new attention mine", "pip install ./fwk-mine", "fwk serve --attention-backend mine"):
        assert f"\n{line}\n" in text
