"""Packages of each family and version that was published, which nobody may edit: those of ``v1_acme`` are elsewhere.

``v1_first`` has plugins as ``fwk plugins new`` first made them, ``v2_second`` those of families and versions that came
later, as somebody wrote them by the pages for authors.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.helpers.packages import FIXTURES, digest, import_path

import fwk
from fwk import Facts, SamplingParams
from fwk.plugins import VERSIONS, PluginSet, discover, find, load_object

FIRST, SECOND = FIXTURES / "v1_first", FIXTURES / "v2_second"
DIGESTS = {FIRST: "55ae0abdedd2684e", SECOND: "6b1de7fa0fbaa497"}
REFUSED = ("kv_transfer", "multimodal")
"""Families whose first version nothing adapts (docs/plugins/stability.md)."""

FLAWS = {"tool_parsers": "test_the_time_is_linear_in_the_text"}
"""What a later suite found in a plugin itself, by a test that was not there when it was published."""

CONTRACTS = [
    (path.parents[2].name, f"{path.parents[1].name}.{path.parent.name}")
    for path in sorted(FIXTURES.glob("*/*/*/contract.py"))
]
FIRST_FAMILIES = [module.partition(".")[2] for package, module in CONTRACTS if package == FIRST.name]
SECOND_FAMILIES = [module.partition(".")[2] for package, module in CONTRACTS if package == SECOND.name]


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> PluginSet:
    """The frozen packages, installed."""
    for package in (*DIGESTS, FIXTURES / "v1_acme"):
        monkeypatch.syspath_prepend(str(package))
    return discover()


@pytest.mark.parametrize("package", DIGESTS, ids=lambda package: package.name)
def test_the_package_is_as_it_was_published(package: Path) -> None:
    why = "this package stands for those already installed: adapt core, not the package"
    assert digest(package) == DIGESTS[package], why


@pytest.mark.filterwarnings("ignore:.* is called .* now:DeprecationWarning")
def test_every_family_has_a_package_of_each_version(plugins: PluginSet) -> None:
    published = {(family, version) for family, known in VERSIONS.items() for version in range(1, known.newest + 1)}
    kept = {(item.family, item.api) for item in plugins.all() if item.package in ("first-v1", "second-v2", "acme-v1")}
    assert kept | {(family, 1) for family in REFUSED} == published


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
    for family in SECOND_FAMILIES:
        assert load_object(find(plugins, family, "second")).__module__ == f"second_v2.{family}.plugin"
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


@pytest.mark.filterwarnings("ignore:.* is called .* now:DeprecationWarning")
def test_those_of_later_versions_serve_a_model(plugins: PluginSet, tiny_llm: Callable[..., fwk.LLM]) -> None:
    """A device, a quantizer, a decoder and a feature, together; the decoder changes no token."""
    prompts, greedy = [[7, 8, 9, 10] * 3, [50, 60, 70]], SamplingParams(max_tokens=8, temperature=0)
    asking = SamplingParams(max_tokens=8, temperature=0, extra={"second_margin": True})
    options = {"max_total_tokens": 512, "max_running_requests": 4, "random_seed": 0, "enable_plugin": ("second-v2",)}
    options |= {"device": "second", "quantization": "second", "load_format": "dummy", "plugins": plugins}
    model, found = str(tiny_llm(random_seed=0).opened_path), list[list[list[int]]]()
    for algorithm in ("none", "second"):
        with fwk.LLM(model, speculative_algorithm=algorithm, **options) as llm:  # type: ignore[arg-type]
            found += [[one.token_ids for one in llm.generate(prompts, given)] for given in (greedy, asking)]
            assert llm.engine.stats().features["second"]["num_margins"] > 0
    assert found == found[:1] * 4


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("package", "module"),
    [case for case in CONTRACTS if not (case[0] == FIRST.name and case[1].partition(".")[2] in REFUSED)],
)
def test_each_contract_that_it_was_published_with_passes(package: str, module: str, tmp_path: Path) -> None:
    family = module.partition(".")[2]
    (tmp_path / "test_contract.py").write_text(f"from {module}.contract import *\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    places = import_path(FIXTURES / package)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    if package == FIRST.name and family in FLAWS:
        words += ["-k", f"not {FLAWS[family]}"]
    done = subprocess.run(
        words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": places}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
