"""The real model: token for token what transformers makes of the same weights, in every setting."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import fwk
from fwk import SamplingParams

pytestmark = pytest.mark.model

NUM_TOKENS = 48
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Q: What is 17 + 25?\nA:",
    "Les trois couleurs du drapeau français sont",
    "1, 1, 2, 3, 5, 8,",
    "The three laws of thermodynamics are as follows. First,",
    "Dear Sir or Madam,\n\nI am writing to",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
    "Ingredients: 2 eggs, 100 g flour, 50 g sugar. Method:",
    "東京は日本の",
    "SELECT name, age FROM users WHERE",
    "In 1969, Neil Armstrong",
    " ".join(f"Item {i} costs {i * 7 % 13} dollars." for i in range(40)) + " Item 40 costs",
    "😀 Emoji can be",
]
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers in float32 on the weights it de-quantises itself."""
    import torch
    from transformers import AutoModelForCausalLM

    with fwk.LLM(max_total_tokens=1024) as llm:
        path = llm.opened_path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    model.eval()
    return model


@pytest.fixture(scope="module")
def alone() -> list[fwk.Completion]:
    """Float32, one prompt at a time, nothing cached."""
    with fwk.LLM(dtype="float32", prefix_cache="none", max_total_tokens=4096) as llm:
        return [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]


def test_greedy_output_is_that_of_transformers(reference: Any, alone: list[fwk.Completion]) -> None:
    """Given our output, transformers would have picked every one of its tokens, so it would have made the same."""
    import torch

    for done in alone:
        ids = done.prompt_token_ids + done.token_ids
        with torch.inference_mode():
            logits = reference(torch.tensor([ids])).logits[0, len(done.prompt_token_ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == done.token_ids
        wanted = torch.log_softmax(logits.float(), -1)
        assert done.logprobs is not None
        for row, entry in zip(wanted, done.logprobs, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
            for token, logprob in entry.top:
                assert logprob == pytest.approx(float(row[token]), abs=1e-3)


SETTINGS = [
    {},
    {"prefix_cache": "none", "chunked_prefill_size": 16},
    {"chunked_prefill_size": 4096, "max_prefill_tokens": 4096},
    {"max_total_tokens": 1024},  # forces pre-emption
]


@pytest.mark.parametrize(
    "options",
    [SETTINGS[0], SETTINGS[3], *(pytest.param(options, marks=pytest.mark.sweep) for options in SETTINGS[1:3])],
)
def test_float32_output_is_the_same_in_every_setting(options: dict[str, Any], alone: list[fwk.Completion]) -> None:
    with fwk.LLM(dtype="float32", **{"max_total_tokens": 8192, **options}) as llm:
        together = llm.generate(PROMPTS, GREEDY)
        assert [done.token_ids for done in together] == [done.token_ids for done in alone]
        if options.get("max_total_tokens"):
            assert llm.engine.stats().preemptions > 0
        elif not options:
            again = llm.generate(PROMPTS, GREEDY)  # from the cache
            assert [done.token_ids for done in again] == [done.token_ids for done in alone]
            assert max(done.cached_tokens for done in again) > 300
            for prompt, done in zip(PROMPTS[:2], alone, strict=False):
                assert "".join(llm.stream(prompt, GREEDY)) == done.text


def test_a_seed_gives_the_same_sample_alone_and_in_a_batch() -> None:
    settings = [
        SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=100 + i, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    with fwk.LLM(dtype="float32", max_total_tokens=8192) as llm:
        together = llm.generate(PROMPTS, settings)
        for i in (0, 3, 8, 14):
            assert llm.generate(PROMPTS[i], settings[i])[0].token_ids == together[i].token_ids


ROUNDING = 0.3
"""Difference of two log-probabilities that bfloat16 may turn round: near 20, two logits are 0.125 apart."""


def test_bfloat16_output_differs_only_where_two_tokens_are_close() -> None:
    settings = [{"prefix_cache": "none", "max_running_requests": 1}, *SETTINGS[::3]]
    runs: list[list[fwk.Completion]] = []
    for options in settings:
        with fwk.LLM(dtype="bfloat16", **{"max_total_tokens": 8192, **options}) as llm:
            runs.append(llm.generate(PROMPTS[::4], GREEDY))
    compared = 0
    for run in runs[1:]:
        for one, other in zip(runs[0], run, strict=True):
            assert one.logprobs is not None
            for token, entry, token2 in zip(one.token_ids, one.logprobs, other.token_ids, strict=True):
                if token != token2:
                    assert entry.top[0][1] - entry.top[1][1] < ROUNDING
                    break
                compared += 1
    assert compared > 0.5 * len(SETTINGS[::3]) * len(PROMPTS[::4]) * NUM_TOKENS
