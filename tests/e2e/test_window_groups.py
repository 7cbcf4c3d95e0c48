"""A model most of whose layers have a window, in block tables of their own: tokens are transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fwk
from fwk import SamplingParams
from tests.helpers.checkpoints import make_checkpoint, reference_greedy, token_ids

SHARED = token_ids(50, seed=1)
PROMPTS = [*([*SHARED, *token_ids(n, seed=n)] for n in (1, 17, 30)), token_ids(120, seed=2), token_ids(5, seed=3)]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "page_size": 8,
    "max_total_tokens": 160,
    "max_prefill_tokens": 48,
    "chunked_prefill_size": 20,
    "max_running_requests": 8,
    "check_blocks": True,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """Gemma 3: three layers with a window of 24, one without."""
    folder = tmp_path_factory.mktemp("gemma")
    model = make_checkpoint(folder, "gemma3")
    return folder, [reference_greedy(model, prompt, 24) for prompt in PROMPTS]


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    ("options", "tables", "why"),
    [
        ({}, 4, ""),
        ({"attention_backend": "torch", "kv_cache_dtype": "auto"}, 4, ""),
        ({"executor": "threaded"}, 4, ""),
        ({"executor": "processes", "tensor_parallel_size": 2}, 4, ""),
        ({"disable_hybrid_swa_memory": True}, 1, "--disable-hybrid-swa-memory"),
        ({"prefix_cache": "hierarchical"}, 1, "cache hierarchical keeps blocks in tiers"),
        # Accepted drafts end sequences early: a smaller pool has to be full before that.
        ({"speculative_algorithm": "ngram", "max_total_tokens": 120, "speculative_num_draft_tokens": 2}, 4, ""),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_tokens_are_those_of_transformers(
    tiny: tuple[Path, list[list[int]]], options: dict[str, Any], tables: int, why: str
) -> None:
    """In chunks, in mixed batches, after pre-emption and from cached prefixes."""
    folder, wanted = tiny
    with fwk.LLM(str(folder), **{**OPTIONS, **options}) as llm:
        assert llm.engine.info.num_block_tables == tables
        said = [reason for reason in llm.engine.info.reasons if "see a window only" in reason]
        assert [reason.rpartition(": ")[2] for reason in said] == ([why] if why else [])
        for _ in range(2):
            assert [one.token_ids for one in llm.generate(PROMPTS, GREEDY)] == wanted
        stats = llm.engine.stats()
        assert stats.cached_prompt_tokens > 0
        assert stats.preemptions > 0
        assert stats.accepted_draft_tokens > 0 or "speculative_algorithm" not in options
        assert stats.num_held_blocks == 0


@pytest.mark.sweep
def test_layers_that_all_have_a_window_gain_too(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "mistral", num_hidden_layers=4)
    wanted = [reference_greedy(model, prompt, 24) for prompt in PROMPTS]
    lengths: list[int] = []
    for off in (True, False):
        with fwk.LLM(str(tmp_path), **OPTIONS, disable_hybrid_swa_memory=off) as llm:
            assert llm.engine.info.num_block_tables == (1 if off else 4)
            for _ in range(2):
                assert [one.token_ids for one in llm.generate(PROMPTS, GREEDY)] == wanted
            assert llm.engine.stats().cached_prompt_tokens > 0
            lengths.append(llm.engine.info.max_model_len)
    assert lengths[0] == 160
    assert lengths[1] > 2 * 160


def test_a_window_as_long_as_the_context_leaves_one_table(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "mistral", num_hidden_layers=4)
    with fwk.LLM(str(tmp_path), **OPTIONS, context_length=24) as llm:
        assert llm.engine.info.num_block_tables == 1
        assert not [reason for reason in llm.engine.info.reasons if "see a window only" in reason]
