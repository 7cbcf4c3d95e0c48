"""docs/plugins: pages are those of today's interfaces, and the code of the tutorial runs."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest
from tests.helpers.architectures import close, write
from tests.helpers.checkpoints import reference_logits, token_ids
from tests.helpers.models import RunnableModel

from fwk.plugins import FAMILIES
from fwk_kit.cli.family_pages import page
from fwk_kit.cli.plugin_new import create, package
from fwk_kit.testing.base import installed

DOCS = Path(__file__).parents[2] / "docs/plugins"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pages_example_is_the_template(family: str) -> None:
    """Which the kit's tests run."""
    text = (DOCS / f"{family}.md").read_text()
    for path, source in package(installed(), family).items():
        if path.startswith("src/") and source:
            assert source.rstrip() in text, f"{path}: run make docs"


@pytest.mark.sweep
@pytest.mark.parametrize("family", FAMILIES)
def test_pages_are_those_of_the_interfaces(family: str) -> None:
    """Word for word. Slow: any docstring of an interface changes a page, which waits for the next ``make docs``."""
    assert (DOCS / f"{family}.md").read_text() == page(family), "run make docs"


def test_the_tutorials_code_runs() -> None:
    found = re.findall(r"<!-- run -->\n```python\n(.*?)```", (DOCS / "tutorial.md").read_text(), re.DOTALL)
    assert len(found) == 4
    for number, source in enumerate(found):
        module = ModuleType(f"tutorial_{number}")
        exec(compile(source, f"tutorial.md, piece {number}", "exec"), vars(module))  # noqa: S102 - our own page


def test_the_tutorials_first_hour_is_what_new_prints() -> None:
    text = (DOCS / "tutorial.md").read_text()
    for line in ("fwk plugins new attention mine", "pip install ./fwk-mine", "fwk serve --attention-backend mine"):
        assert f"\n{line}\n" in text


def follow(text: str, root: Path) -> None:
    """Apply a page's changes: blocks of diff replace lines, blocks of Python are put at the end of their file."""
    for kind, path, body in re.findall(r"```(diff|python)\n# (fwk-arcee/\S+)\n(.*?)```", text, re.DOTALL):
        file = root / path
        source = file.read_text()
        if kind == "python":
            file.write_text(f"{source.rstrip()}\n\n\n{body}")
            continue
        for old, new in re.findall(r"((?:^-.*\n)*)((?:^\+.*\n)*)(?:^ .*\n)*", body, re.MULTILINE):
            before, after = (re.sub(r"^[-+]", "", lines, flags=re.MULTILINE) for lines in (old, new))
            if before:
                assert source.count(before) == 1, before
                source = source.replace(before, after)
            elif after:
                raise AssertionError(f"nothing says where {after!r} goes")
        file.write_text(source)


def test_the_walk_through_adds_a_real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a newcomer would: the package that the page ends with says what transformers says."""
    folder = create(installed(), "models", "arcee", tmp_path)
    follow((DOCS / "models.md").read_text(), tmp_path)
    monkeypatch.syspath_prepend(str(folder / "src"))
    arcee = importlib.import_module("fwk_arcee.plugin")
    for changes in ({}, {"attention_bias": True, "mlp_bias": True}):
        checkpoint = tmp_path / f"tiny{len(changes)}"
        reference = write(checkpoint, "arcee", changes)
        prompt = token_ids(50)
        model = RunnableModel(checkpoint, model_class=arcee.ArceeModel)
        close(model.logits(prompt, [30, 1, 19]), reference_logits(reference, prompt))
        assert model.weights.asked == set(model.weights.names())
    contract = importlib.import_module("fwk_arcee.contract").TestArcee
    assert contract.config["hidden_act"] == "relu2"
    assert contract.reference_config is None
