"""The kit of plugin authors: templates pass their contracts, and plugins that are wrong in one place do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.helpers.packages import import_path
from tests.helpers.templates import install

from fwk import FeatureSpec
from fwk.interfaces.feature import Wire
from fwk.plugins import FAMILIES
from fwk_kit.cli.plugin_new import package
from fwk_kit.testing import SUITES, FeatureSuite, suite_of
from fwk_kit.testing.base import installed
from fwk_kit.testing.parsers import StreamParserSuite

WRONG: dict[str, dict[str, dict[str, Any]]] = tomllib.loads(
    (Path(__file__).parents[1] / "fixtures/wrong_plugins.toml").read_text()
)
"""By family and name: a fault of the template, and the tests that must notice."""


CONFTEST = """
import json, pathlib

KEPT = json.loads((pathlib.Path(__file__).parent / "kept.json").read_text())


def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if item.name.startswith(tuple(KEPT[item.path.stem]))]
"""


def outcomes(folder: Path, *words: str) -> dict[str, dict[str, str]]:
    """Run the folder's tests in one other process: by module and test, what it failed of; empty where it passed."""
    environment = {
        **os.environ,
        "PYTHONPATH": import_path(folder / "site"),
    }
    report = folder / "report.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        "pytest.ini",
        f"--junitxml={report}",
    ]
    (folder / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [*command, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=1500, check=False
    )
    assert report.is_file(), done.stdout + done.stderr
    found: dict[str, dict[str, str]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if case.find("skipped") is None:
            module = (case.get("classname") or "").partition(".")[0]
            bad = [child for kind in ("failure", "error") for child in case.findall(kind)]
            told = [f"{child.get('message', '')}\n{(child.text or '?')[-2000:]}" for child in bad]
            found.setdefault(module, {})[case.get("name", "?")] = "\n".join(told)
    assert found, done.stdout + done.stderr
    return found


class Unset(msgspec.Struct):
    num_open: int


class Set(msgspec.Struct):
    num_open: int = 0


def test_numbers_of_features_have_defaults() -> None:
    def judge(stats: type[msgspec.Struct]) -> None:
        spec = FeatureSpec(name="mine", engine="mine:Part", wire=Wire(stats=stats))
        FeatureSuite().test_what_is_sent_can_be_sent(SimpleNamespace(declaration=spec))  # type: ignore[arg-type]

    judge(Set)
    with pytest.raises(AssertionError, match=r"wire\.stats: num_open has no default"):
        judge(Unset)


def test_every_family_has_a_suite_and_a_template() -> None:
    assert set(SUITES) == set(FAMILIES) == set(WRONG)
    for family in FAMILIES:
        assert suite_of(family).family == family
        assert "src/fwk_mine/plugin.py" in package(installed(), family)


def test_every_installed_plugin_of_ours_is_under_contract() -> None:
    """Each has a class in tests/contracts, unless a test of its own does more than the suite can."""
    text = "\n".join(path.read_text() for path in (Path(__file__).parents[1] / "contracts").glob("test_*.py"))
    missing = {
        item.key for item in installed().all() if item.package == "fwk" and f'plugin = "{item.name}"' not in text
    }
    assert missing <= ELSEWHERE, missing - ELSEWHERE


ELSEWHERE = {
    "models.qwen2_vl", "models.qwen3_vl", "models.qwen3_5_vl",
    "loaders.dummy", "logits_processors.prefix_tree", "dialects.playground", "dialects.scoring",
    "dialects.openai-audio", "features.beam_search", "features.transcription",
    *(f"speculative.{name}" for name in ("standalone", "eagle", "eagle3", "medusa", "mtp")),
    *(f"models.{name}" for name in (
        "baichuan", "bart", "bert", "bert_classifier", "bloom", "chatglm", "cohere", "colbert", "deepseek_v2",
        "deepseek_v3", "falcon", "gemma", "gemma2", "gemma3", "glm4", "glm4_moe", "gpt2", "gpt_neox", "gpt_oss",
        "granite", "granite_hybrid", "internlm", "jamba", "lfm2", "llama4", "mamba", "mamba2", "minicpm", "mixtral",
        "nemotron_h", "olmo2", "olmoe", "opt", "phi3", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_next", "roberta",
        "roberta_classifier", "smollm3", "starcoder2", "t5",
    )),
}  # fmt: skip
"""tests/plugins and tests/e2e look at them: dialects that generate nothing, features with methods of their own, dummy
weights, masks with rules of their own, models with other references."""


def judge(folder: Path, faults: list[tuple[str, str]]) -> dict[str, dict[str, str]]:
    """Templates whole and with each of these faults, all in one process; only the tests that are to notice run."""
    kept: dict[str, list[str]] = {}
    for family, name in faults:
        fault = WRONG[family][name]
        whole = f"test_my_{family}"
        if whole not in kept:
            install(folder, family, f"my_{family}")
        kept[whole] = [*kept.get(whole, []), *fault["noticed_by"]]
        install(folder, family, f"my_{family}_{name}", (fault["old"], fault["new"]))
        kept[f"test_my_{family}_{name}"] = fault["noticed_by"]
    (folder / "kept.json").write_text(json.dumps(kept))
    (folder / "conftest.py").write_text(CONFTEST)
    return outcomes(folder)


FIRST = [(family, next(iter(faults))) for family, faults in list(WRONG.items())[::3]]
"""What the gate tries: of every third family, since each template is a package to find and a suite to run."""

OTHERS = [(family, name) for family, faults in WRONG.items() for name in faults if (family, name) not in FIRST]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """With one fault each."""
    return judge(tmp_path_factory.mktemp("kit"), FIRST)


@pytest.fixture(scope="module")
def judged_others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """With all other faults."""
    return judge(tmp_path_factory.mktemp("kit"), OTHERS)


@pytest.mark.parametrize("family", [family for family, _ in FIRST])
def test_a_right_plugin_passes(judged: dict[str, dict[str, str]], family: str) -> None:
    assert {name: told for name, told in judged[f"test_my_{family}"].items() if told} == {}


@pytest.mark.parametrize(("family", "name"), FIRST)
def test_a_wrong_plugin_fails(judged: dict[str, dict[str, str]], family: str, name: str) -> None:
    assert any(judged[f"test_my_{family}_{name}"].values())


@pytest.mark.sweep
@pytest.mark.parametrize(("family", "name"), OTHERS)
def test_a_plugin_with_another_fault_fails(judged_others: dict[str, dict[str, str]], family: str, name: str) -> None:
    assert any(judged_others[f"test_my_{family}_{name}"].values())
    assert not any(judged_others[f"test_my_{family}"].values())


class Timed(StreamParserSuite):
    """A parser whose time is ``cost`` of its text's length, every fifth time with that of others on the machine."""

    samples = {"<a>1</a>": ("", "", [])}
    cost: Callable[[int], float]
    num_calls = 0

    def _seconds(self, item: Any, pieces: Sequence[str]) -> float:
        self.num_calls += 1
        return self.cost(len("".join(pieces))) * (10 if self.num_calls % 5 == 1 else 1)


@pytest.mark.parametrize(("power", "passes"), [(1, True), (2, False)])
def test_a_parsers_time_is_judged_without_what_else_runs(power: int, passes: bool) -> None:
    suite: Any = Timed()
    suite.cost = lambda length: length**power
    with nullcontext() if passes else pytest.raises(AssertionError, match="s for a quarter"):
        suite.test_the_time_is_linear_in_the_text(None)


@pytest.mark.sweep
@pytest.mark.timeout(1600)  # one server or two for each
def test_every_template_passes_its_whole_contract(tmp_path: Path) -> None:
    """In processes of their own too, and served."""
    for family in WRONG:
        install(tmp_path, family, f"my_{family}")
    found = outcomes(tmp_path)
    assert set(found) == {f"test_my_{family}" for family in WRONG}
    bad = [f"{module}::{name}: {told}" for module, tests in found.items() for name, told in tests.items() if told]
    assert not bad, "\n\n".join(bad)  # a comparison would be cut short
