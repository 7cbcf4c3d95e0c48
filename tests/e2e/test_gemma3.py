"""The real Gemma 3 270M, from its GGUF file to tokens."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

import fwk
from fwk import SamplingParams
from tests.helpers.checkpoints import reference_greedy

NUM_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
LONG = (
    "".join(f"Item {i} costs {i * 7 % 13} dollars.\n" for i in range(80)) + "Item 80 costs"
)  # beyond the window of 512
CONTINUATIONS = {
    "The capital of France is": " the capital of the country of France. It is the largest city in France and the "
    "second largest city in Europe. It",
    "def fibonacci(n):\n    ": "if n == 0:\n        return 0\n    elif n == 1:\n        return 1",
    LONG: " 1 dollars.\nItem 81 costs 8 dollars.\nItem 82 costs 2 dollars.",
}
"""What transformers 5.23 generates in float32 from the same file."""


@pytest.fixture(scope="module")
def gemma() -> Iterator[fwk.LLM]:
    with fwk.LLM("gemma3-270m", dtype="float32", max_total_tokens=4096) as llm:
        yield llm


@pytest.mark.sweep
@pytest.mark.model
def test_texts_become_the_published_tokens(gemma: fwk.LLM) -> None:
    """Ids of the published tokenizer.json."""
    for text, ids in {
        "Hello, world!": [2, 9259, 236764, 1902, 236888],
        "  two  spaces\n\n\nnew\tline": [2, 138, 13498, 138, 35220, 109, 1951, 255968, 1257],
        "\u2581 x": [2, 138, 236781],
        "1234 日本語": [2, 236770, 236778, 236800, 236812, 33375, 238582],
        "<start_of_turn>user\nhi<end_of_turn>\n": [2, 105, 2364, 107, 2202, 106, 107],
    }.items():
        assert gemma.text.tokenizer.encode(text).ids == ids
        assert gemma.text.tokenizer.decode(ids[1:], skip_special_tokens=False) == text.replace("\u2581", " ")


@pytest.mark.sweep
@pytest.mark.model
def test_continuations_are_those_of_transformers(gemma: fwk.LLM) -> None:
    prompts = list(CONTINUATIONS)
    done = gemma.generate(prompts, GREEDY)
    assert {prompt: one.text for prompt, one in zip(prompts, done, strict=True)} == CONTINUATIONS


@pytest.mark.sweep
@pytest.mark.model
def test_tokens_are_those_of_transformers_reading_the_same_file(gemma: fwk.LLM) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    path = gemma.opened_path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference: Any = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
    prompts = [gemma.text.tokenizer.encode(prompt).ids for prompt in CONTINUATIONS]
    wanted = [reference_greedy(reference, prompt, NUM_TOKENS) for prompt in prompts]
    assert [done.token_ids for done in gemma.generate(prompts, GREEDY)] == wanted
