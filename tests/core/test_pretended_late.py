"""Models and heads whose next step is launched while their drafts are verified: the device alone knows the lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.helpers.draft_heads import knows_words, save_eagle, save_eagle3, save_medusa
from tests.helpers.interpreted import interpreted
from tests.helpers.pretend_cuda import EXACT, Steps, serving, triton_kernels
from tests.helpers.pretend_cuda.steps import Said, assert_same, said
from tests.helpers.tiny import save_llama

import fwk
from fwk import SamplingParams
from fwk.engine.scheduler import Scheduler
from fwk.types import EngineStats

pytestmark = interpreted

PROMPTS = [[1, 7, 3, 9] * 5, [5, 5, 6]]  # the first comes in chunks
OPTIONS: dict[str, Any] = {
    "max_total_tokens": 256,
    "max_running_requests": 2,
    "chunked_prefill_size": 16,
    "random_seed": 7,
    **EXACT,
}
DRAFTS: dict[str, Any] = {"speculative_num_steps": 3, "speculative_adaptive": False}
EAGER = {"disable_cuda_graph": True}
ADAPTIVE = {**EAGER, "speculative_adaptive": True}
PRESSED = {**EAGER, "max_total_tokens": 48, "page_size": 4, "schedule_conservativeness": 0.0}


def asks(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **more})


SAMPLED = [asks(temperature=1.1, seed=3), asks(temperature=0.8, seed=4, top_k=30, top_p=0.95, min_p=0.01)]
LONG_SAMPLED = [asks(temperature=0.8, seed=seed, max_tokens=24) for seed in (3, 4)]
ASKED: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "draft model, captured": ("standalone", asks(), {}),
    "draft model, log-probabilities": ("standalone", [asks(logprobs=2), asks()], EAGER),
    "draft model alongside a sampled one": ("standalone", [asks(), asks(temperature=0.9, seed=3)], EAGER),
    "draft model, pre-empted": ("standalone", asks(max_tokens=24), {**PRESSED, "prefix_cache": "none"}),
    "draft model, sampled, captured": ("standalone", SAMPLED, {}),
    "draft model, sampled without seeds": ("standalone", asks(temperature=1.1, logprobs=2), EAGER),
    "draft model, sampled, pre-empted": ("standalone", LONG_SAMPLED, {**PRESSED, "prefix_cache": "none"}),
    "EAGLE-3, captured": ("eagle3", asks(), {}),
    "EAGLE-3": ("eagle3", asks(max_tokens=13), EAGER),
    "EAGLE-3 of adaptive depth": ("eagle3", asks(), ADAPTIVE),
    "EAGLE-3 alongside a sampled one": ("eagle3", [asks(), asks(temperature=0.9, seed=3)], EAGER),
    "EAGLE-3 alongside a penalty": ("eagle3", [asks(), asks(frequency_penalty=0.4)], EAGER),
    "EAGLE-3, pre-empted": ("eagle3", asks(max_tokens=24), PRESSED),
    "EAGLE-3 that ends early": ("eagle3", [asks(max_tokens=5), asks()], EAGER),
    "EAGLE-3, sampled": ("eagle3", SAMPLED, EAGER),
    "EAGLE-3, sampled alongside a penalty": ("eagle3", [SAMPLED[0], asks(frequency_penalty=0.4)], EAGER),
    "EAGLE": ("eagle", asks(), EAGER),
    "Medusa": ("medusa", asks(), EAGER),
    "Medusa, sampled": ("medusa", SAMPLED, EAGER),
    "Medusa, captured": ("medusa", asks(), {}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_llama(folder / "target", seed=1)
    save_llama(folder / "standalone", seed=1, noise=0.02)
    with fwk.LLM(str(folder / "target"), device="cpu", **OPTIONS) as llm:
        words = sorted({token for one in llm.generate(PROMPTS, asks()) for token in one.token_ids})
    knows_words(save_eagle3(folder / "eagle3"), words[:2])
    save_eagle(folder / "eagle")
    save_medusa(folder / "medusa", 3)
    return folder


Drafted = dict[tuple[int, ...], list[int]]
"""What was drafted after each text."""


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> Drafted:
    found: Drafted = {}
    real = Scheduler.update

    def update(self: Scheduler, step: Any, result: Any) -> Any:
        for (sequence, epoch), scheduled in zip(step.sequences, step.batch.sequences, strict=True):
            if scheduled.draft_token_ids and sequence.num_preemptions == epoch:
                text, drafts = tuple(sequence.token_ids), list(scheduled.draft_token_ids)
                found[text] = max(drafts, found.get(text, []), key=len)  # fewer of a text that is about to end
        return real(self, step, result)

    monkeypatch.setattr(Scheduler, "update", update)
    return found


def elsewhere(models: Path, asked: tuple[str, Any, dict[str, Any]], steps: Steps) -> tuple[Said, EngineStats]:
    kind, sampling, more = asked
    own = {"speculative_algorithm": kind, "speculative_draft_model_path": str(models / kind)}
    options = {**OPTIONS, **DRAFTS, **own, "attention_backend": "triton", **more}
    with triton_kernels(), serving(models / "target", steps, **options) as llm:
        return said(llm, sampling, PROMPTS), llm.engine.stats()


def from_each_text(
    models: Path, kind: str, texts: list[list[int]], sampling: list[SamplingParams], drafted: Drafted
) -> Drafted:
    """What is drafted after each text, computed on a CPU as a prompt of its own."""
    options = {**OPTIONS, **DRAFTS, "max_running_requests": 8, "max_total_tokens": 4096, "prefix_cache": "none"}
    own = {"speculative_algorithm": kind, "speculative_draft_model_path": str(models / kind)}
    drafted.clear()
    with fwk.LLM(str(models / "target"), device="cpu", **options, **own) as llm:
        llm.generate([text[:-1] for text in texts], sampling)
    return dict(drafted)


def check(models: Path, asked: tuple[str, Any, dict[str, Any]], drafted: Drafted, steps: Steps) -> EngineStats:
    """Tokens of the CPU without drafts, drafts of the CPU without overlap, and nothing a device would trip over."""
    kind, sampling, _ = asked
    with fwk.LLM(str(models / "target"), device="cpu", **OPTIONS) as llm:
        wanted = said(llm, sampling, PROMPTS)
    drafted.clear()
    found, stats = elsewhere(models, asked, steps)
    assert_same(found, wanted)
    each = sampling if isinstance(sampling, list) else [sampling] * len(PROMPTS)
    steps.assert_one_wait(reads_drafts=any(one.frequency_penalty for one in each))
    assert steps.num_in_flight().count(2) > 3
    mine: dict[tuple[int, ...], tuple[list[int], SamplingParams]] = {}
    for prompt, (tokens, _), one in zip(PROMPTS, wanted, each, strict=True):
        if (one.temperature and one.seed is None) or one.frequency_penalty:
            continue  # what is drafted follows from more than the text
        alone = msgspec.structs.replace(one, max_tokens=6, logprobs=None, stop_token_ids=[])
        whole = tuple(prompt + tokens)
        mine |= {text: (drafts, alone) for text, drafts in drafted.items() if whole[: len(text)] == text}
    if not mine:
        assert all(one.temperature for one in each)
        return stats
    assert len(mine) > 2
    expected = from_each_text(models, kind, [list(text) for text in mine], [one for _, one in mine.values()], drafted)
    for text, (drafts, _) in mine.items():
        count = min(len(drafts), len(expected[text]))  # either may have had room for fewer
        assert count > 0
        assert drafts[:count] == expected[text][:count], len(text)
    return stats


QUICK = ("EAGLE-3", "Medusa", "Medusa, sampled")


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.sweep) for n in ASKED])
def test_steps_run_ahead_of_drafts_made_late(
    models: Path, monkeypatch: pytest.MonkeyPatch, drafted: Drafted, name: str
) -> None:
    kind, sampling, more = ASKED[name]
    stats = check(models, ASKED[name], drafted, Steps(monkeypatch))
    assert (stats.preemptions > 0) == ("pre-empted" in name)
    if kind == "standalone" or (kind == "eagle3" and isinstance(sampling, SamplingParams) and more is not ADAPTIVE):
        assert 0 < stats.accepted_draft_tokens < stats.draft_tokens


@pytest.mark.sweep
def test_a_stop_token_ends_one_of_two_texts(models: Path, monkeypatch: pytest.MonkeyPatch, drafted: Drafted) -> None:
    with fwk.LLM(str(models / "target"), device="cpu", **OPTIONS) as llm:
        tokens = said(llm, asks(), PROMPTS)[0][0]
    steps = Steps(monkeypatch)
    for place in (4, 5, 6, 7):
        stop = tokens[place]
        if stop not in tokens[:place]:
            check(models, ("standalone", [asks(stop_token_ids=[stop]), asks()], EAGER), drafted, steps)
            break
    else:
        raise AssertionError(tokens)
