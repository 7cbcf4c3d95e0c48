"""Prompts that are too long are refused or shortened, and streams gather tokens, as the options say."""

from __future__ import annotations

from typing import Any

import pytest

from fwk.config import ModelOptions
from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import EmbedInput, GenerateInput, ModelCard, OutputDelta
from fwk.server.stream_interval import DeltaBuffer
from fwk.text import check_embed_input, prepare_input
from fwk.text.prompt_limits import PromptLimits
from fwk.types import SamplingParams

SIZES: dict[str, int] = {"max_model_len": 20, "vocab_size": 100}


def limits(**options: Any) -> PromptLimits:
    return PromptLimits.of(ModelOptions(**options))


def prepared(length: int, max_tokens: int | None = 1, **options: Any) -> list[int]:
    item = GenerateInput(list(range(length)), SamplingParams(max_tokens=max_tokens))
    return prepare_input(item, None, **SIZES, limits=limits(**options)).prompt_token_ids  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "kept"),
    [
        ("head", list(range(9, 14))),
        ("tail", [0, 1, 2, 3, 4]),
        ("center", [0, 1, 2, 12, 13]),
    ],
)
def test_a_part_of_a_long_prompt_is_cut_off(mode: str, kept: list[int]) -> None:
    assert prepared(14, long_truncation_mode=mode, max_req_input_len=5) == kept
    assert prepared(5, long_truncation_mode=mode, max_req_input_len=5) == [0, 1, 2, 3, 4]
    assert prepared(14, long_truncation_mode=mode, max_req_input_len=1) == [13 if mode == "head" else 0]


def test_what_is_left_makes_room_for_the_output() -> None:
    assert len(prepared(30, max_tokens=7, long_truncation_mode="head")) == 13
    assert len(prepared(30, max_tokens=None, long_truncation_mode="head")) == 19
    assert len(prepared(15, max_tokens=7, long_truncation_mode="tail")) == 13
    with pytest.raises(InvalidRequest, match="30 tokens"):
        prepared(30, max_tokens=20, long_truncation_mode="head")  # nothing would be left


def test_the_answer_gives_way_as_sglangs_does() -> None:
    """``--allow-auto-truncate``: the prompt stays whole, and only what leaves no room for a token is cut off it."""
    for length, wanted, kept, made in ((15, 7, 15, 5), (15, 3, 15, 3), (30, 7, 19, 1), (15, None, 15, 5)):
        item = GenerateInput(list(range(length)), SamplingParams(max_tokens=wanted, min_tokens=min(wanted or 0, 6)))
        cut = limits(long_truncation_mode="answer")
        found = prepare_input(item, None, **SIZES, limits=cut)  # type: ignore[arg-type]
        assert (found.prompt_token_ids, found.sampling.max_tokens) == (list(range(kept)), made)
        assert found.sampling.min_tokens <= made


def test_long_prompts_are_refused_unless_told_otherwise() -> None:
    with pytest.raises(InvalidRequest, match=r"has 6 tokens; this server takes at most 5 \(--max-req-input-len\)"):
        prepared(6, max_req_input_len=5)
    with pytest.raises(InvalidRequest, match="has 20 tokens; this server takes at most 19, so that one can follow"):
        prepared(20, max_req_input_len=500)


def test_inputs_of_embeddings_are_shortened_too() -> None:
    item = EmbedInput(list(range(30)))
    cut = limits(long_truncation_mode="tail", max_req_input_len=25)
    assert check_embed_input(item, **SIZES, limits=cut).token_ids == list(range(20))
    with pytest.raises(InvalidRequest, match="at most 20"):
        check_embed_input(item, **SIZES)
    with pytest.raises(InvalidRequest, match="at most 20"):  # the second text of a pair would begin elsewhere
        check_embed_input(EmbedInput(list(range(30)), segment_start=4), **SIZES, limits=cut)


def test_the_card_says_how_long_a_prompt_may_be() -> None:
    assert ModelCard("m", "/m", 0, 20, 100, max_input_len=5).max_prompt_len == 5
    assert ModelCard("m", "/m", 0, 20, 100, max_input_len=50).max_prompt_len == 19


def delta(index: int, text: str, count: int = 1, **fields: Any) -> OutputDelta:
    return OutputDelta(index, text, [7] * count, **fields)


def test_tokens_are_gathered_after_the_first() -> None:
    buffer = DeltaBuffer(3)
    found = [buffer.ready([delta(0, text)]) for text in "abcdef"]
    assert [[d.text for d in ready] for ready in found] == [["a"], [], [], ["bcd"], [], []]
    [last] = buffer.ready([delta(0, "g", finish_reason="stop", num_output_tokens=7)])
    assert (last.text, last.token_ids, last.finish_reason, last.num_output_tokens) == ("efg", [7] * 3, "stop", 7)


def test_sequences_are_gathered_apart_and_nothing_is_lost() -> None:
    buffer = DeltaBuffer(2)
    first: Any = ["p"]
    one: Any = {"logprobs": ["x"]}
    found = buffer.ready([delta(0, "a", prompt_logprobs=first, **one), delta(1, "A", **one), delta(0, "b", **one)])
    assert [(d.index, d.text) for d in found] == [(0, "a"), (1, "A")]
    assert found[0].prompt_logprobs == first
    found = buffer.ready([delta(1, "BC", 2, **one), delta(0, "c", **one)])
    assert [(d.index, d.text, d.logprobs) for d in found] == [(1, "BC", ["x"]), (0, "bc", ["x", "x"])]
    [last] = buffer.ready([delta(0, "", 0, finish_reason="length")])
    assert (last.text, last.logprobs) == ("", None)
