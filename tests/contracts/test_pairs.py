"""Every two features serve a tiny model with the tokens of the plain path, or are refused in one sentence.

The gate has all refusals, and of the pairs that run those whose places in the list of features, taken as a ring, lie 7
apart, until each feature is in one. Two ranks are tried with experts that move; alone in tests/e2e. All other pairs are
the sweep's.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.helpers.pairs import BY_NAME, NO_MODEL, PAIRS, Places, Run, Setting, exclusive, serve
from tests.helpers.pairs_page import REFUSED, page

from fwk.cli.common import read_options
from fwk.cli.option_parsing import Parser
from fwk.errors import FwkError
from fwk.plugins import discover

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return Places(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@cache
def reference(places: Places, key: str, names: tuple[str, ...]) -> Run:
    """The plain path's output; combinations that differ only in how they compute share one."""
    setting = Setting([BY_NAME[name] for name in names])
    model, options = setting.reference(places)
    return serve(model, options, setting)


def check(places: Places, names: tuple[str, ...]) -> None:
    """A combination gives the reference's output, and every feature of it took part."""
    setting = Setting([BY_NAME[name] for name in names])
    model, options = setting.options(places)
    found = serve(model, options, setting, "tiny" if setting.has_adapter else "")
    semantic = tuple(
        name
        for name in sorted(names)
        if (f := BY_NAME[name]).shared or f.sampling or f.n > 1 or f.kind or f.weights or f.adapter
    )
    wanted = reference(places, str(setting.reference(places)), semantic)
    assert found.tokens == wanted.tokens
    for ours, theirs in zip(
        found.logprobs + found.prompt_logprobs, wanted.logprobs + wanted.prompt_logprobs, strict=True
    ):
        assert ours == pytest.approx(theirs, abs=2e-3, rel=2e-3)
    for ours, theirs in zip(found.hidden_states, wanted.hidden_states, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-3, rtol=2e-3)
    for feature in setting.features:
        assert feature.proof(found), f"{feature.name} took no part"


DISTANCE = 9
RANKS = {"tensor parallel", "pipeline parallel", "expert parallel"}
ALONE = ("chunked prefill", "images", "double sparsity")
"""Tried alone in the gate; the last is refused with the drafts that it would be tried with."""


def is_apart(pair: tuple[str, str]) -> bool:
    """Whether the gate may try a pair."""
    names = list(BY_NAME)
    place, other = map(names.index, pair)
    follows = {(place + DISTANCE) % len(names): pair[1], (other + DISTANCE) % len(names): pair[0]}
    second = follows.get(other) or follows.get(place)
    return second is not None and second != "triton attention" and not RANKS & {*pair}


def _sample() -> set[tuple[str, str]]:
    found, met = set(REFUSED), set[str]()
    for pair in PAIRS:
        if pair not in REFUSED and is_apart(pair) and not met.issuperset(pair):
            found.add(pair)
            met.update(pair)
    return found


SAMPLE = _sample()
"""The pairs that the gate tries."""


@pytest.mark.parametrize(
    "name", [name if name in ALONE else pytest.param(name, marks=pytest.mark.sweep) for name in BY_NAME]
)
def test_each_alone(places: Places, name: str) -> None:
    """A pair of the gate that runs proves both of its features too, so that the gate needs but a few alone."""
    check(places, (name,))


@pytest.mark.parametrize(
    "pair",
    [pytest.param(pair, marks=() if pair in SAMPLE else pytest.mark.sweep) for pair in PAIRS],
    ids=[" + ".join(pair) for pair in PAIRS],
)
def test_pairs(places: Places, pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    sentence = REFUSED.get(pair)
    if sentence is None:
        check(places, pair)
        return
    clash = exclusive([BY_NAME[name] for name in pair])
    if clash is not None:
        option, one, other = clash
        flag = "--" + option.replace("_", "-")
        with pytest.raises(SystemExit):
            read_options(Parser("fwk serve", allow_abbrev=False), [flag, one, flag, other])
        said = capsys.readouterr().err.strip()
    else:
        with pytest.raises(FwkError) as caught:
            check(places, pair)
        said = str(caught.value)
    assert re.search(sentence, said), said
    assert "\n" not in said


OTHER_TRIPLES = (
    {"LoRA", "state group", "tensor parallel"},  # refused: adapters on matrices that are several in one need one rank
    {"cached prefix", "pre-emption", "prefill elsewhere"},  # the small cache has room for what is fetched alone
    {"cached prefix", "pre-emption", "state group"},  # the small cache keeps no state until the prompts come again
)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@settings(max_examples=80, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(names=st.lists(st.sampled_from(list(BY_NAME)), min_size=3, max_size=3, unique=True))
def test_random_triples(places: Places, names: list[str]) -> None:
    ordered = tuple(name for name in BY_NAME if name in names)
    assume(not any(pair in REFUSED or pair in NO_MODEL for pair in combinations(ordered, 2)))
    assume(not any(three <= set(ordered) for three in OTHER_TRIPLES))
    assume(sum(bool(BY_NAME[name].weights) for name in ordered) < 3)  # a third format has no layers left
    check(places, ordered)


def test_the_sample_has_each_feature() -> None:
    sampled = [pair for pair in PAIRS if pair in SAMPLE and pair not in REFUSED]
    assert {name for pair in sampled for name in pair} == BY_NAME.keys() - RANKS - {"double sparsity"}
    assert len(sampled) < len(PAIRS) / 8


def test_at_least_91_of_100_pairs_run() -> None:
    assert set(REFUSED) <= set(PAIRS)
    assert len(REFUSED) <= 0.09 * len(PAIRS)


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs/compatibility.md").read_text() == page(), "run python -m tests.helpers.pairs_page"


def test_the_core_contains_no_features_name() -> None:
    """Whatever a plugin is called, core knows families only."""
    everyday = {"none", "torch", "local", "file", "host", "hub", "cpu"}
    everyday |= {"dummy", "json", "log", "openai", "priority", "processes", "random", "reserve", "session", "suffix"}
    everyday |= {"wheel", "replicas"}  # which experts have, too
    kit = ("testing", "templates")  # they use libraries and number formats of which plugins have their names
    # Features have their families' names: what core says of them is counted (docs/design/source-layout.md).
    names = {item.name for item in discover().all() if item.family not in ("logits_processors", "features")} - everyday
    # Not compilers' words for instructions, such as "-mamx-int8", nor the core's own options: of captured steps, and
    # --max-mamba-cache-size, SGLang's name; and a module of torch is no plugin.
    other = r"(?<!-mamx-)(?<!--disable-)(?<!--enable-profile-)(?<!--(?=cuda-graph))(?<!--max-)(?<!torch\.(?=profiler))"
    other += r"(?<!--enable-piecewise-)(?<!--piecewise-)"
    # Fields of requests and replies that plugins answer.
    places = ("interfaces/completion.py", "interfaces/dialect.py", "types/sampling.py")
    fields = {(place, name) for place in places for name in ("hidden_states", "prompt_logprobs")}
    pattern = re.compile(rf"\b{other}({'|'.join(map(re.escape, sorted(names)))})\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "core/fwk").rglob("*.py"))
        if not str(path.relative_to(ROOT / "core/fwk")).startswith(kit)
        for name in pattern.findall(_code(path))
        if (str(path.relative_to(ROOT / "core/fwk")), name) not in fields
    ]
    assert not found


def _code(path: Path) -> str:
    """A module without comments and docstrings, which may name the paper an algorithm is from."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [x for x in body if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))]  # type: ignore[attr-defined]
    return ast.unparse(tree)
