"""FlexAttention as a plugin: its numbers are held by the contract suite; here what auto says of it, and an engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import fwk
from fwk import Facts, Host, SamplingParams
from fwk.errors import PluginError
from fwk.plugins import discover, find

PROMPTS = [[7, 8, 9] * 12, [5] * 20, [100, 101]]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def test_auto_leaves_it_and_says_why() -> None:
    spec = find(discover(), "attention", "flex").declaration
    assert spec.refusal(Facts()) is None
    assert spec.auto_skip_reason(Facts()) == "is unfused on a CPU: name it with --attention-backend flex"
    on_gpu = spec.auto_skip_reason(Facts(host=Host("cuda", (9, 0)))) or ""
    assert on_gpu.startswith("has not been run on a GPU yet")


@pytest.mark.sweep
def test_an_engine_has_the_tokens_of_torch(tiny_llm: Callable[..., fwk.LLM]) -> None:
    options = {"chunked_prefill_size": 16, "dtype": "float32"}
    found = [
        [done.token_ids for done in tiny_llm(**backend, **options).generate(PROMPTS, GREEDY)]
        for backend in (
            {"attention_backend": "flex"},
            {"attention_backend": "torch"},
            {"prefill_attention_backend": "torch", "decode_attention_backend": "flex", "kv_cache_dtype": "auto"},
        )
    ]
    assert found[0] == found[1] == found[2]


def test_trees_of_drafts_are_refused(tiny_llm: Callable[..., fwk.LLM]) -> None:
    with pytest.raises(PluginError, match="tree_mask"):
        tiny_llm(attention_backend="flex", speculative_algorithm="ngram", speculative_ngram_max_bfs_breadth=3)
