"""Beam search against transformers' own, on the same tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import fwk
from fwk.errors import InvalidRequest
from fwk.types import TokenLogprobs
from fwk_features.beam_search.search import BeamSearch
from tests.helpers.lazy import lazy
from tests.helpers.tiny import save_llama

transformers = lazy("transformers")

PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, 40)]
CASES: list[dict[str, Any]] = [
    {"num_beams": 1},
    {"num_beams": 4},
    {"num_beams": 4, "length_penalty": 0.0},
    {"num_beams": 3, "length_penalty": 2.0, "early_stopping": "never"},
    {"num_beams": 5, "length_penalty": -1.0, "early_stopping": True},
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[fwk.LLM, Any]]:
    """A tiny random model, here and in transformers."""
    folder = save_llama(tmp_path_factory.mktemp("llama"))
    with fwk.LLM(str(folder), dtype="float32", max_total_tokens=4096) as llm:
        yield llm, transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.gate(3)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("ends", ["often", "never"])
def test_the_texts_are_those_of_transformers(
    served: tuple[fwk.LLM, Any], monkeypatch: pytest.MonkeyPatch, case: dict[str, Any], ends: str
) -> None:
    llm, model = served
    width = case["num_beams"]
    # An end token that beams meet: what four free beams write third.
    free = llm.beam_search(PROMPTS, 4, 6, n=4, ignore_eos=True)
    end = free[0][1].token_ids[2] if ends == "often" else None
    part = next(part for item, part in llm._parts if item.name == "beam_search")
    monkeypatch.setattr(part, "context", replace(part.context, end_token_ids=() if end is None else (end,)))
    found = llm.beam_search(PROMPTS, max_tokens=12, n=width, **case)
    num_ended = 0
    for prompt, beams in zip(PROMPTS, found, strict=True):
        told = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=12,
            do_sample=False,
            num_return_sequences=width,
            eos_token_id=end,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **({"length_penalty": 1.0} | case),
        )
        expected = []
        for row in told.sequences[:, len(prompt) :].tolist():
            length = row.index(end) + 1 if end in row else len(row)
            expected.append(row[:length])
        assert [beam.token_ids for beam in beams] == expected
        if width > 1:
            penalty = case.get("length_penalty", 1.0)
            scores = [
                sum(entry.logprob for entry in beam.logprobs or []) / len(beam.token_ids) ** penalty for beam in beams
            ]
            assert scores == pytest.approx(told.sequences_scores.tolist(), rel=1e-4)
        num_ended += sum(beam.finish_reason == "stop" for beam in beams)
        assert all((beam.finish_reason == "stop") == (beam.token_ids[-1] == end) for beam in beams)
    if case.get("length_penalty", 1.0) <= 1:  # else long texts win
        assert (num_ended > 0) == (ends == "often")


def test_what_cannot_be_searched_is_refused(tiny_llm: Callable[..., fwk.LLM]) -> None:
    llm = tiny_llm()
    with pytest.raises(InvalidRequest, match="at most 10 beams"):
        llm.beam_search([[1, 2]], 11, 4)
    with pytest.raises(InvalidRequest, match="n must be between 1 and num_beams"):
        llm.beam_search([[1, 2]], 2, 4, n=3)


def test_a_search_ends_when_no_candidate_can_go_on() -> None:
    search = BeamSearch(2, (9,), max_tokens=8)
    search.update([TokenLogprobs(9, -0.1, 1, [(9, -0.1), (1, -3.0), (2, -3.5), (3, -4.0)])])
    assert [beam.token_ids for beam in search.running] == [[1], [2]]
    row = TokenLogprobs(9, -0.1, 1, [(9, -0.1), (4, -5.0), (5, -6.0), (6, -7.0)])
    search.update([row, row])
    assert search.is_done
    assert [(beam.token_ids, beam.is_cut) for beam in search.best(2)] == [([9], False), ([1, 9], False)]
