"""Plugins as ``fwk plugins new`` first made them, of the families that ``v1_acme`` lacks: nobody may edit them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.helpers.packages import FIXTURES, digest

import fwk
from fwk import Facts, SamplingParams
from fwk.plugins import FAMILIES, PluginSet, discover, find, load_object

FIRST = FIXTURES / "v1_first"
DIGEST = "55ae0abdedd2684e"
REFUSED = ("kv_transfer", "multimodal")
"""Families whose first version nothing adapts (docs/plugins/stability.md)."""

LATER = {"devices", "engine_pools", "expert_placers", "features"}
"""Families that came after the first pages for authors."""

ELSEWHERE = {"attention", "cache", "logits_processors", "observers", "quant", "samplers"}
"""Families of ``v1_acme``."""

FLAWS = {"tool_parsers": "test_the_time_is_linear_in_the_text"}
"""What a later suite found in a plugin itself, by a test that was not there when it was published."""

FIRST_FAMILIES = sorted(path.parent.name for path in FIRST.glob("first_v1/*/plugin.py"))


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> PluginSet:
    """The frozen package, installed."""
    monkeypatch.syspath_prepend(str(FIRST))
    return discover()


def test_the_package_is_as_it_was_published() -> None:
    assert digest(FIRST) == DIGEST, "this package stands for those already installed: adapt core, not the package"


def test_every_family_has_a_package_of_its_first_version() -> None:
    assert {*FIRST_FAMILIES, *ELSEWHERE, *LATER} == set(FAMILIES)


@pytest.mark.filterwarnings("ignore:.* is called .* now:DeprecationWarning")
def test_each_plugin_is_declared_and_imported_or_refused_with_a_sentence(plugins: PluginSet) -> None:
    assert [broken.sentence() for broken in plugins.broken] == [
        f"plugin '{family}.first' from first-v1 1.0 failed to declare: TypeError: 'first' was written for version 1 of "
        f"the {family} interface, the oldest this fwk takes is 2: install a newer first-v1"
        for family in REFUSED
    ]
    for family in FIRST_FAMILIES:
        if family not in REFUSED:
            assert load_object(find(plugins, family, "first")).__module__ == f"first_v1.{family}.plugin"
    assert find(plugins, "schedulers", "first").declaration.auto_skip_reason(Facts()) == "is for people who ask for it"


@pytest.mark.filterwarnings("ignore:.* is called .* now:DeprecationWarning")
def test_a_policy_is_told_by_the_names_it_knows(plugins: PluginSet, tiny_llm: Callable[..., fwk.LLM]) -> None:
    """Its queue is of the events alone: one that is not told of them starts nothing."""
    prompts, greedy = [[7, 8, 9, 10] * 3, [50, 60, 70], [1, 2]], SamplingParams(max_tokens=4, temperature=0)
    plain = tiny_llm(random_seed=0)
    wanted = [completion.token_ids for completion in plain.generate(prompts, greedy)]
    options = {"max_total_tokens": 512, "max_running_requests": 2, "schedule_policy": "first", "random_seed": 0}
    with fwk.LLM(str(plain.opened_path), load_format="dummy", plugins=plugins, **options) as llm:  # type: ignore[arg-type]
        assert llm.engine.info.chosen["schedulers"] == "first"
        assert [completion.token_ids for completion in llm.generate(prompts, greedy)] == wanted


@pytest.mark.sweep
@pytest.mark.parametrize("family", [family for family in FIRST_FAMILIES if family not in REFUSED])
def test_each_contract_that_it_was_published_with_passes(family: str, tmp_path: Path) -> None:
    (tmp_path / "test_contract.py").write_text(f"from first_v1.{family}.contract import *\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    places = os.pathsep.join([str(FIRST), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    if family in FLAWS:
        words += ["-k", f"not {FLAWS[family]}"]
    done = subprocess.run(
        words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": places}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
