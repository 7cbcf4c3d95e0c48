"""A step on a pretended device waits for nothing when it is launched, and once when it is collected."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.pretend_cuda import Steps, serving

import fwk
from fwk import GrammarRequest, SamplingParams
from fwk.interfaces.device import NoEvent
from fwk.plugins import answers
from fwk.types import Request
from fwk_cache.tiers.store import BlockStore
from fwk_grammar.grammar_masks.masks import GrammarMasks
from fwk_speculative.drafting.part_drafts import PartDrafts

PROMPTS = [[1, 7, 3, 9] * 9, list(range(40, 75)), [5, 5, 6]]
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "max_total_tokens": 2048,
    "max_running_requests": 8,
    "chunked_prefill_size": 16,
    "dtype": "float32",
    "check_blocks": True,
    "attention_backend": "torch",
    "operator_backend": "torch",
    "sampling_backend": "torch",
}


def asks(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 10, "temperature": 0.0, "ignore_eos": True, **more})


LOOPS = {"logit_bias": {50: 3.0, 51: 3.0, 60: 2.5}, "frequency_penalty": 0.4, "repetition_penalty": 1.05}
"""A text of few tokens, which says what it said before, and is penalised for it."""
FEW = {50: 6.0, 51: 6.0, 60: 6.0}
SCHEMA = json.dumps({"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]})
NGRAM = {"speculative_algorithm": "ngram", "speculative_adaptive": False}
TREES = {**NGRAM, "speculative_ngram_max_bfs_breadth": 3}
ASKED: dict[str, tuple[Any, dict[str, Any]]] = {
    "greedy": (asks(), {}),
    "sampled": (asks(temperature=0.9, top_p=0.9, top_k=20, min_p=0.01, seed=3), {}),
    "penalties": (asks(temperature=0.8, seed=5, presence_penalty=0.3, **LOOPS), {}),
    "masks": (asks(min_tokens=4, stop_token_ids=[50], bad_word_token_ids=[[51], [60, 50]], **LOOPS), {}),
    "allowed tokens": (asks(allowed_token_ids=[4, 8, 15]), {}),
    "grammar": (asks(grammar=GrammarRequest("regex", "[a-z]{40}"), temperature=0.9, seed=2), {}),
    "a schema whose text is known ahead": (asks(grammar=GrammarRequest("json_schema", SCHEMA), max_tokens=40), {}),
    "a grammar for one of them": (
        [asks(), asks(grammar=GrammarRequest("json_schema", SCHEMA), max_tokens=40), asks(temperature=1.0, seed=1)],
        {},
    ),
    "log-probabilities": (asks(logprobs=2, temperature=0.9, seed=4), {}),
    "log-probabilities of prompts": ([asks(prompt_logprobs=2), asks(), asks(prompt_logprobs=0, logprobs=1)], {}),
    "n-gram chains": (asks(**LOOPS), NGRAM),
    "n-gram chains, sampled": (asks(temperature=0.7, seed=7, logprobs=1), NGRAM),
    "n-gram trees": (asks(temperature=0.7, seed=7, logprobs=1, max_tokens=30, logit_bias=FEW), TREES),
    "n-gram trees, penalties": (asks(frequency_penalty=0.9, max_tokens=30, logit_bias=FEW), TREES),
    "n-gram trees, grammar": (asks(grammar=GrammarRequest("regex", "(ab|ac|ad){30}"), max_tokens=24), TREES),
    "n-gram, thresholds": (asks(temperature=0.9, seed=9), {**NGRAM, "speculative_accept_threshold_acc": 0.8}),
    "no overlap": (asks(**LOOPS), {"disable_overlap_schedule": True}),
}


Said = tuple[list[int], str | None, list[float], list[float]]


def said(llm: fwk.LLM, sampling: Any) -> list[Said]:
    """Tokens, how the text ended, and the log-probabilities of both kinds."""
    return [
        (
            done.token_ids,
            done.finish_reason,
            [found.logprob for found in done.logprobs or []],
            [found.logprob for found in done.prompt_logprobs or [] if found is not None],
        )
        for done in llm.generate(PROMPTS, sampling)
    ]


def on_cpu(model: Path, sampling: Any, **options: Any) -> list[Said]:
    with fwk.LLM(str(model), device="cpu", **OPTIONS | options) as llm:
        return said(llm, sampling)


def elsewhere(model: Path, sampling: Any, steps: Steps | None = None, **options: Any) -> list[Said]:
    with serving(model, steps, **OPTIONS | options) as llm:
        return said(llm, sampling)


def assert_same(found: list[Said], wanted: list[Said]) -> None:
    for mine, other in zip(found, wanted, strict=True):
        assert mine[:2] == other[:2]
        assert mine[2] == pytest.approx(other[2], abs=1e-4)
        assert mine[3] == pytest.approx(other[3], abs=1e-4)


@pytest.mark.gate(2)
@pytest.mark.parametrize("name", ASKED)
def test_no_launch_waits_and_no_collected_step_twice(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    sampling, options = ASKED[name]
    wanted = on_cpu(tiny_folder, sampling, **options)
    steps = Steps(monkeypatch)
    assert_same(elsewhere(tiny_folder, sampling, steps, **options), wanted)
    steps.assert_one_wait()


def test_steps_with_grammars_overlap(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step's model is launched before the text is known that its masks follow from."""
    steps = Steps(monkeypatch)
    elsewhere(tiny_folder, ASKED["grammar"][0], steps)
    in_flight = steps.num_in_flight()
    assert max(in_flight) == 2
    assert in_flight.count(2) >= 9


@pytest.mark.sweep
def test_text_that_is_known_ahead_is_drafted(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafted: list[int] = []
    real = PartDrafts.enter

    def enter(self: PartDrafts, sampled: Any, results: Any, parents: Any) -> list[int]:
        slots = real(self, sampled, results, parents)
        drafted.extend(len(results[slot].draft_token_ids) for slot in slots)
        return slots

    monkeypatch.setattr(PartDrafts, "enter", enter)
    sampling, _ = ASKED["a schema whose text is known ahead"]
    plain = Steps(monkeypatch)
    elsewhere(tiny_folder, sampling, plain)
    assert max(drafted) > 2
    num_steps = len(plain.waits("collect"))
    elsewhere(tiny_folder, sampling, plain, disable_jump_forward=True)
    assert num_steps < len(plain.waits("collect"))


def test_a_refusal_that_the_device_finds_says_what_it_says_on_the_cpu(tiny_folder: Path) -> None:
    impossible = asks(allowed_token_ids=[4], bad_word_token_ids=[[4]])
    params = [asks(), impossible, asks(seed=1)]
    with fwk.LLM(str(tiny_folder), device="cpu", **OPTIONS) as llm:
        wanted = errors(llm, params)
    with serving(tiny_folder, **OPTIONS) as llm:
        assert errors(llm, params) == wanted
    assert [error is None for error in wanted] == [True, False, True]
    assert "allowed_token_ids" in (wanted[1] or "")


def errors(llm: fwk.LLM, params: list[SamplingParams]) -> list[str | None]:
    """How each request failed; None: it did not."""
    found: dict[str, str | None] = {}
    for i, (prompt, sampling) in enumerate(zip(PROMPTS, params, strict=True)):
        llm.engine.add(Request(request_id=str(i), prompt_token_ids=prompt, sampling=sampling))
    while llm.engine.has_work:
        found |= {event.request_id: event.error for event in llm.engine.step() if event.finish_reason is not None}
    return [found[str(i)] for i in range(len(PROMPTS))]


def test_one_that_raises_ends_its_own_sequence_alone(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = GrammarMasks.apply
    calls = 0

    def fails_at_the_fourth(self: GrammarMasks, logits: torch.Tensor, view: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls >= 4:
            raise RuntimeError("broken")
        return real(self, logits, view)

    monkeypatch.setattr(GrammarMasks, "apply", fails_at_the_fourth)
    monkeypatch.setattr(answers, "_guarded_class", lambda *_: None)  # a guard has the method that was there
    params = [asks(), ASKED["grammar"][0], asks(temperature=1.0, seed=1)]
    steps = Steps(monkeypatch)
    with serving(tiny_folder, steps, **OPTIONS) as llm:
        assert [error is None for error in errors(llm, params)] == [True, False, True]
    steps.assert_one_wait()


TIERS: dict[str, Any] = {"prefix_cache": "hierarchical", "max_total_tokens": 112}


def restored(llm: fwk.LLM) -> list[list[int]]:
    """Tokens of a prompt whose K/V come back from a tier, after others took its blocks."""
    found = [llm.generate([PROMPTS[0]], asks())[0].token_ids]
    llm.generate([list(range(100 + n, 150 + n)) for n in (0, 60)], asks(max_tokens=1))
    found.append(llm.generate([PROMPTS[0]], asks())[0].token_ids)
    assert llm.engine.stats().restored_prompt_tokens > 0
    return found


def test_blocks_go_to_tiers_without_a_wait(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fwk.LLM(str(tiny_folder), device="cpu", **OPTIONS | TIERS) as llm:
        wanted = restored(llm)
    steps = Steps(monkeypatch)
    with serving(tiny_folder, steps, **OPTIONS | TIERS) as llm:
        assert restored(llm) == wanted
    steps.assert_one_wait()


@pytest.mark.sweep
def test_tiers_that_are_given_what_has_not_come_are_noticed(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_buffer, save = BlockStore._take_buffer, BlockStore.save

    def save_at_once(self: BlockStore, pairs: Any) -> None:
        save(self, pairs)
        self.settle()

    monkeypatch.setattr(
        BlockStore, "_take_buffer", lambda self: dataclasses.replace(take_buffer(self), event=NoEvent())
    )
    monkeypatch.setattr(BlockStore, "save", save_at_once)
    with fwk.LLM(str(tiny_folder), device="cpu", **OPTIONS | TIERS) as llm:
        wanted = restored(llm)
    with serving(tiny_folder, **OPTIONS | TIERS) as llm:
        found = restored(llm)
    assert found[0] == wanted[0]
    assert found[1] != wanted[1]


def test_outputs_end_where_their_grammars_do(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [asks(grammar=GrammarRequest("regex", f"[a-z]{{{n}}}"), temperature=0.9, seed=n) for n in (3, 5, 40)]
    steps = Steps(monkeypatch)
    assert_same(elsewhere(tiny_folder, ends, steps), on_cpu(tiny_folder, ends))
    steps.assert_one_wait()
