"""Former names of what plugins may import: they lead to what has moved, and say where it is."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fwk import QuantizerSpec
from fwk.interfaces.attention import AttentionContext
from fwk.interfaces.declaration import Declaration, Facts
from fwk.interfaces.schedule import ScheduleContext, SchedulePolicy
from fwk.types.batch import ForwardBatch
from fwk_deprecated import MEMBERS, MODULES, NAMES

STABILITY = Path(__file__).parents[2] / "docs/plugins/stability.md"


OF_PACKAGES = pytest.mark.filterwarnings("ignore:fwk.* is called:DeprecationWarning")
"""What the packages of a former module say, where this test is the first to import them."""


@OF_PACKAGES
@pytest.mark.parametrize(("old", "new"), MODULES.items())
def test_a_former_module_is_the_new_one_and_says_so(
    old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "third.py").write_text(f"from {old} import *\nimport {old} as module\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in (old, "third"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.warns(DeprecationWarning, match=rf"{old} is called {new} now") as seen:
        third: Any = importlib.import_module("third")
    assert seen[0].filename == str(tmp_path / "third.py")
    source = importlib.import_module(new)
    public = [name for name in vars(source) if not name.startswith("_")]
    assert public
    assert all(getattr(third, name) is getattr(source, name) for name in public)
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = third.module.nothing_of_that_name
    monkeypatch.delitem(sys.modules, "third")


@pytest.mark.filterwarnings("ignore:fwk.layers:DeprecationWarning")
def test_a_function_is_not_hidden_by_a_former_module_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fwk.layers", "fwk.layers.insert"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.import_module("fwk.layers.insert")
    assert importlib.import_module("fwk.layers").insert is importlib.import_module("fwk_layers").insert


@OF_PACKAGES
@pytest.mark.parametrize(
    ("module", "old", "new"), [(module, *row) for module, names in NAMES.items() for row in names.items()]
)
def test_a_former_name_is_the_new_one_and_says_so(module: str, old: str, new: str) -> None:
    place, _, attribute = new.rpartition(".")
    with pytest.warns(DeprecationWarning, match=f"{module}.{old} is called {new} now"):
        found = getattr(importlib.import_module(module), old)
    assert found is getattr(importlib.import_module(place), attribute)
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'nothing'"):
        _ = importlib.import_module(module).nothing


def test_former_members_are_read_by_their_new_names() -> None:
    for module, members in MEMBERS.items():
        for member, new in members.items():
            owner, _, old = member.partition(".")
            cls = getattr(importlib.import_module(module), owner)
            with pytest.warns(DeprecationWarning, match=f"{member} is called {new} now"):
                assert getattr(cls, old).fget(SimpleNamespace(**{new: 7})) == 7
    assert isinstance(vars(AttentionContext)["team"], property)
    assert isinstance(vars(ForwardBatch)["logits_at"], property)


def test_methods_of_former_names_are_called_by_the_new_ones() -> None:
    with pytest.warns(DeprecationWarning, match="is called") as seen:  # noqa: PT031

        class Old(SchedulePolicy):
            def waits(self, sequence: Any, view: Any) -> Any:
                return "waits"

            def displaced(self, sequence: Any, running: Any, view: Any) -> Any:
                return "displaced"

        class OldSpec(QuantizerSpec):
            def reluctance(self, facts: Facts) -> str | None:
                return "is reluctant"

    assert [str(w.message).rpartition(".")[2] for w in seen] == [
        "displaced is called choose_preemption_victim now",
        "waits is called on_waiting now",
        "reluctance is called auto_skip_reason now",
    ]
    assert {w.filename for w in seen} == {__file__}
    policy: Any = Old(ScheduleContext())
    assert policy.on_waiting(None, None) == "waits"
    assert policy.choose_preemption_victim(None, [], None) == "displaced"
    assert type(policy).on_started is SchedulePolicy.on_started
    spec: Declaration = OldSpec(name="x", load="a:b")
    assert spec.auto_skip_reason(Facts()) == "is reluctant"


def test_the_page_names_every_former_module() -> None:
    text = STABILITY.read_text()
    assert [name for name in MODULES if f"`{name}`" not in text] == []


def test_nothing_of_ours_uses_a_former_name() -> None:
    code = "import fwk, fwk.plugins; fwk.plugins.discover(); import fwk.interfaces.lora, fwk_native.thread_pool"
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
