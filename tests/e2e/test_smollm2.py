"""The real model: token for token what transformers makes of the same weights, in every setting."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import msgspec
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


GOLDEN = Path(__file__).with_name("smollm2_greedy.json")
"""What transformers picks in float32, and its log-probabilities: ``python -m tests.e2e.test_smollm2`` writes it."""
CLOSE = 1e-3
"""Log-probabilities that lie so close may change places with the order of a sum."""


def transformers_greedy() -> list[dict[str, Any]]:
    """transformers in float32 on the weights it de-quantises itself: of each prompt ids, scores and least lead."""
    import torch
    from transformers import AutoModelForCausalLM

    with fwk.LLM(max_total_tokens=1024) as llm:
        path, encode = llm.opened_path, llm.text.tokenizer.encode
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # as with ignore_eos: it may be picked, and ends nothing
    made: list[dict[str, Any]] = []
    for prompt in PROMPTS:
        ids = torch.tensor([encode(prompt).ids])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        scores = torch.log_softmax(torch.cat(out.logits).float(), -1)
        best = scores.topk(2).values
        made.append(
            {
                "prompt": ids[0].tolist(),
                "ids": out.sequences[0, ids.shape[1] :].tolist(),
                "logprobs": [round(float(x), 5) for x in best[:, 0]],
                "lead": round(float((best[:, 0] - best[:, 1]).min()), 5),
            }
        )
    return made


@pytest.fixture(scope="module")
def golden() -> list[dict[str, Any]]:
    return json.loads(GOLDEN.read_text())


@pytest.fixture(scope="module")
def alone() -> list[fwk.Completion]:
    """Float32, one prompt at a time, nothing cached."""
    with fwk.LLM(dtype="float32", prefix_cache="none", max_total_tokens=4096) as llm:
        return [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]


def test_tokens_and_scores_are_those_of_transformers(golden: list[dict[str, Any]]) -> None:
    """Of prompts side by side, which start as others run."""
    with fwk.LLM(dtype="float32", max_total_tokens=4096) as llm:
        done = llm.generate(PROMPTS[::2], msgspec.structs.replace(GREEDY, max_tokens=16))
    for ours, wanted in zip(done, golden[::2], strict=True):
        assert wanted["lead"] > CLOSE
        assert (ours.prompt_token_ids, ours.token_ids) == (wanted["prompt"], wanted["ids"][:16])
        assert ours.logprobs is not None
        assert [e.logprob for e in ours.logprobs] == pytest.approx(wanted["logprobs"][:16], abs=CLOSE)


@pytest.mark.sweep
def test_the_golden_file_is_what_transformers_makes(golden: list[dict[str, Any]]) -> None:
    for made, kept in zip(transformers_greedy(), golden, strict=True):
        assert made["ids"] == kept["ids"]
        assert made["logprobs"] == pytest.approx(kept["logprobs"], abs=CLOSE)


@pytest.mark.sweep
def test_greedy_output_is_that_of_transformers(golden: list[dict[str, Any]], alone: list[fwk.Completion]) -> None:
    for ours, wanted in zip(alone, golden, strict=True):
        assert (ours.prompt_token_ids, ours.token_ids) == (wanted["prompt"], wanted["ids"])
        assert ours.logprobs is not None
        assert [entry.logprob for entry in ours.logprobs] == pytest.approx(wanted["logprobs"], abs=CLOSE)


SETTINGS = [
    {},
    {"prefix_cache": "none", "chunked_prefill_size": 16},
    {"chunked_prefill_size": 4096, "max_prefill_tokens": 4096},
    {"max_total_tokens": 1024},  # forces pre-emption
]


@pytest.mark.sweep
@pytest.mark.parametrize("options", SETTINGS)
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(transformers_greedy()) + "\n")
