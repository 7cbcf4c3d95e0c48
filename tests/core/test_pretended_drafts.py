"""Models and heads that draft on a pretended device: one wait for a step, however deep they draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.draft_heads import knows_words, save_eagle3, save_medusa
from tests.helpers.pretend_cuda import EXACT, Steps, serving
from tests.helpers.pretend_cuda.steps import Said, assert_same, said
from tests.helpers.tiny import save_llama

import fwk
from fwk import GrammarRequest, SamplingParams
from fwk.types import EngineStats

PROMPTS = [[1, 7, 3, 9] * 9, list(range(40, 75)), [5, 5, 6]]
OPTIONS: dict[str, Any] = {
    "max_total_tokens": 2048,
    "max_running_requests": 8,
    "chunked_prefill_size": 16,
    **EXACT,
    "speculative_num_steps": 4,
    "speculative_adaptive": False,
}
WORDS = (51, 54, 60)


def asks(**more: Any) -> SamplingParams:
    bias = dict.fromkeys(WORDS, 9.0)  # words that heads know
    return SamplingParams(**{"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, "logit_bias": bias, **more})


SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 6}
GRAMMAR = GrammarRequest("regex", "[ -~]{200}")
TREES = {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 7}
ASKED: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "draft model": ("standalone", asks(), {}),
    "draft model, sampled": ("standalone", asks(logprobs=1, **SAMPLED), {}),
    "EAGLE-3": ("eagle3", asks(), {}),
    "EAGLE-3, sampled": ("eagle3", asks(**SAMPLED), {}),
    "EAGLE-3 of adaptive depth": ("eagle3", asks(), {"speculative_adaptive": True}),
    "EAGLE-3, some sampled": ("eagle3", [asks(), asks(**SAMPLED), asks(logprobs=2)], {}),
    "EAGLE-3 trees": ("eagle3", asks(logprobs=1), TREES),
    "EAGLE-3 trees, sampled": ("eagle3", asks(logprobs=1, **SAMPLED), TREES),
    "EAGLE-3 trees of adaptive depth": ("eagle3", asks(), {**TREES, "speculative_adaptive": True}),
    "EAGLE-3 trees that end early": ("eagle3", [asks(max_tokens=n) for n in (2, 24, 5)], TREES),
    "Medusa": ("medusa", asks(), {}),
    "Medusa trees": ("medusa", asks(), TREES),
}
EARLY: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "penalties": ("eagle3", asks(frequency_penalty=0.4), {}),
    "a grammar": ("eagle3", asks(grammar=GRAMMAR), {}),
    "a tree of a text of a least length": ("eagle3", asks(min_tokens=14, stop_token_ids=[WORDS[1]]), TREES),
}
"""What must know the drafts on the host before they are verified."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_llama(folder / "target", seed=1)
    save_llama(folder / "standalone", seed=1, noise=0.02)
    knows_words(save_eagle3(folder / "eagle3"), WORDS)
    save_medusa(folder / "medusa", 4)
    return folder


def options_of(models: Path, kind: str, more: dict[str, Any]) -> dict[str, Any]:
    return {**OPTIONS, "speculative_algorithm": kind, "speculative_draft_model_path": str(models / kind), **more}


def elsewhere(models: Path, sampling: Any, options: dict[str, Any], steps: Steps) -> tuple[Said, EngineStats]:
    with serving(models / "target", steps, **options) as llm:
        return said(llm, sampling, PROMPTS), llm.engine.stats()


def check(
    models: Path, monkeypatch: pytest.MonkeyPatch, asked: tuple[str, Any, dict[str, Any]], reads_drafts: bool = False
) -> None:
    """The CPU's tokens and the CPU's drafts, and nothing that a device would trip over."""
    kind, sampling, more = asked
    options = options_of(models, kind, more)
    with fwk.LLM(str(models / "target"), device="cpu", **options) as llm:
        wanted, drafted = said(llm, sampling, PROMPTS), llm.engine.stats()
    steps = Steps(monkeypatch)
    found, there = elsewhere(models, sampling, options, steps)
    assert_same(found, wanted)
    if not more.get("speculative_adaptive"):  # else the depth is that of the whole step, and steps are cut otherwise
        assert there.draft_tokens == drafted.draft_tokens
        assert there.accepted_by_position == drafted.accepted_by_position
    assert there.draft_tokens > 0
    assert there.verify_seconds > 0
    if kind != "medusa":
        assert there.accepted_draft_tokens > 0
    steps.assert_one_wait(reads_drafts=reads_drafts)


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", ASKED)
def test_drafting_waits_for_nothing(models: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    check(models, monkeypatch, ASKED[name])


@pytest.mark.sweep
@pytest.mark.parametrize("name", EARLY)
def test_what_reads_drafts_knows_them(models: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    check(models, monkeypatch, EARLY[name], reads_drafts=True)
