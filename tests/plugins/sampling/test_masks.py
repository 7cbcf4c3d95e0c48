"""Bias and masks against transformers' processors and the words of their definitions."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.helpers.lazy import lazy

from fwk.errors import BlameSequence
from fwk.types import SamplingParams
from fwk_sampling.processors.bad_words import BadWords
from fwk_sampling.processors.masks import AllowedTokenIds, LogitBias, MinTokens

transformers = lazy("transformers")

VOCAB = 100
INF = float("inf")


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 5


def forbidden(logits: torch.Tensor) -> list[list[int]]:
    return [row.eq(-INF).nonzero().flatten().tolist() for row in logits]


def test_bias_is_added_where_it_was_asked(apply: Any) -> None:
    logits = random_logits(3)
    out = apply(LogitBias, logits, [{"logit_bias": {3: 2.5, 99: -100.0}}, {}, {"logit_bias": {3: -1.0}}])
    expected = logits.clone()
    expected[0, 3] += 2.5
    expected[0, 99] -= 100.0
    expected[2, 3] -= 1.0
    assert torch.equal(out, expected)


def test_bias_does_not_bring_a_masked_token_back(apply: Any) -> None:
    logits = random_logits(1)
    logits[0, 3] = -INF
    assert apply(LogitBias, logits, [{"logit_bias": {3: 100.0}}])[0, 3] == -INF


def test_edits_work_on_rows_that_do_not_lie_back_to_back(apply: Any, make_context: Any, make_view: Any) -> None:
    wide = torch.randn(2, VOCAB + 28)
    narrow = wide[:, :VOCAB]
    processor = LogitBias(make_context(VOCAB))
    processor.add(6, SamplingParams(logit_bias={VOCAB - 1: 5.0}))
    before = wide.clone()
    processor.apply(narrow, make_view([[1], [1]]))
    before[1, VOCAB - 1] += 5.0
    assert torch.equal(wide, before)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"min_tokens": 3}, [7, 8]),
        ({"min_tokens": 3, "stop_token_ids": [20]}, [7, 8, 20]),
        ({"min_tokens": 3, "stop_token_ids": [20], "ignore_eos": True}, [20]),
        ({"min_tokens": 3, "ignore_eos": True}, []),
        ({"stop_token_ids": [20]}, []),
    ],
)
def test_min_tokens_forbids_what_would_end_the_text(apply: Any, fields: dict[str, Any], expected: list[int]) -> None:
    texts = [[1, 2, *[9] * n] for n in range(5)]
    out = apply(MinTokens, random_logits(5), [fields] * 5, texts, [2] * 5, eos_token_ids=(7, 8))
    assert forbidden(out) == [expected] * 3 + [[], []]


def test_min_tokens_is_transformers_min_new_tokens(apply: Any) -> None:
    reference = transformers.MinNewTokensLengthLogitsProcessor(
        prompt_length_to_skip=4, min_new_tokens=3, eos_token_id=[7, 8]
    )
    for length in range(4, 10):
        logits, text = random_logits(1, length), [1] * length
        out = apply(MinTokens, logits, [{"min_tokens": 3}], [text], [4], eos_token_ids=(7, 8))
        assert torch.equal(out, reference(torch.tensor([text]), logits))


def test_an_end_token_outside_the_vocabulary_is_no_obstacle(apply: Any) -> None:
    out = apply(MinTokens, random_logits(1), [{"min_tokens": 3}], [[1]], [1], eos_token_ids=(7, VOCAB + 5))
    assert forbidden(out) == [[7]]


def test_allowed_token_ids_is_the_complement_of_suppressing(apply: Any) -> None:
    logits = random_logits(2)
    allowed = [3, 50, 99, 3]
    out = apply(AllowedTokenIds, logits, [{"allowed_token_ids": allowed}, {}])
    reference = transformers.SuppressTokensLogitsProcessor([i for i in range(VOCAB) if i not in allowed], device="cpu")
    assert torch.equal(out[:1], reference(torch.tensor([[1]]), logits[:1]))
    assert torch.equal(out[1], logits[1])


def test_bad_words_are_transformers_on_random_texts(apply: Any) -> None:
    rng = random.Random(0)
    for _ in range(60):
        # Few different tokens, so that words do match; words share prefixes, repeat, and contain one another.
        words = [[rng.randrange(4) for _ in range(rng.choice([1, 2, 3, 4, 5]))] for _ in range(rng.randrange(1, 12))]
        words = [word for word in words if len(word) > 1 or word[0] == 0]
        words.append([rng.randrange(4), 50])
        text = [rng.randrange(4) for _ in range(rng.randrange(1, 12))]
        logits = random_logits(1)
        reference = transformers.NoBadWordsLogitsProcessor([list(word) for word in {tuple(word) for word in words}])
        out = apply(BadWords, logits, [{"bad_word_token_ids": words}], [text], [rng.randrange(1, len(text) + 1)])
        assert torch.equal(out, reference(torch.tensor([text]), logits))


def test_each_row_has_its_own_bad_words_and_text(apply: Any) -> None:
    settings = [{"bad_word_token_ids": [[1, 2, 3], [9]]}, {}, {"bad_word_token_ids": [[1, 2, 3], [2, 4]]}]
    assert forbidden(apply(BadWords, random_logits(3), settings, [[1], [1, 2], [1, 2]])) == [[9], [], [3, 4]]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (MinTokens, {"min_tokens": 2, "stop_token_ids": [3, 4]}),
        (BadWords, {"bad_word_token_ids": [[3], [4]]}),
        (AllowedTokenIds, {"allowed_token_ids": [5]}),
    ],
)
def test_a_row_left_without_any_token_is_blamed_on_its_slot(apply: Any, kind: Any, fields: dict[str, Any]) -> None:
    logits = random_logits(2)
    logits[1] = -INF
    logits[1, 3:5] = 1.0
    with pytest.raises(BlameSequence, match="no token is allowed") as caught:
        apply(kind, logits, [fields, fields], [[1], [1]], [1, 1])
    assert caught.value.slot == 6


def test_logits_may_all_be_negative(apply: Any) -> None:
    assert apply(BadWords, random_logits(1) - 100, [{"bad_word_token_ids": [[3]]}]).amax() < 0


def test_nan_is_left_to_the_sampler(apply: Any) -> None:
    logits = random_logits(1)
    logits[0, 50] = torch.nan
    out = apply(BadWords, logits, [{"bad_word_token_ids": [[3]]}])
    assert out[0, 50].isnan()
    assert out[0, 3] == -INF
