"""Drafts go through the whole engine and change nothing but the number of steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import fwk
from fwk import GrammarRequest, SamplingParams
from fwk.errors import ConfigError
from fwk.plugins import discover
from tests.helpers import architectures
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.scripted_decoder import EchoDecoder, EchoPlugin
from tests.helpers.servers import Start

PROMPTS = [[7, 8, 9] * 6, [5] * 20, list(range(10, 50)), [100, 101, 100, 101, 100]]


@pytest.mark.gate(2)
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": 3, "top_k": 5},
        {"temperature": 0.5, "seed": 4, "repetition_penalty": 1.2, "logprobs": 2},
        {"temperature": 0.0, "min_tokens": 9},
        {"temperature": 0.4, "seed": 5, "extra": {"xtc_probability": 0.5, "xtc_threshold": 0.02, "typical_p": 0.9}},
        {"temperature": 0.4, "seed": 6, "extra": {"dry_multiplier": 0.5, "top_n_sigma": 2.0, "top_a": 0.1}},
        {
            "temperature": 0.4,
            "seed": 8,
            "extra": {
                "thinking_token_budget": 6,
                "thinking_marks": {"opens": [], "closes": [[1]], "end": [5, 6, 7, 5, 6, 7, 1]},
            },
        },
        {"temperature": 0.4, "seed": 7, "extra": {"dynatemp_range": 0.3, "watermark": True}},
        {"temperature": 0.6, "seed": 9, "extra": {"mirostat": 2, "mirostat_tau": 1.5}},
        {"temperature": 0.6, "seed": 9, "extra": {"mirostat": 1, "mirostat_tau": 2.5, "mirostat_eta": 0.5}},
    ],
)
@pytest.mark.parametrize("options", [{}, {"max_total_tokens": 160, "page_size": 4, "chunked_prefill_size": 9}])
def test_output_is_token_for_token_the_plain_one(
    tiny_llm: Callable[..., fwk.LLM], tiny_folder: Path, settings: dict[str, object], options: dict[str, object]
) -> None:
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, **settings)  # type: ignore[arg-type]
    plain = tiny_llm().generate(PROMPTS, sampling)
    plugins = discover()
    plugins.register(EchoPlugin(), "speculative.echo", "tests", "1")
    given = {"max_total_tokens": 4096, "max_running_requests": 4, "check_blocks": True, **options}
    with fwk.LLM(str(tiny_folder), load_format="dummy", plugins=plugins, speculative_algorithm="echo", **given) as llm:
        drafted = llm.generate(PROMPTS, sampling)
        assert [done.token_ids for done in drafted] == [done.token_ids for done in plain]
        assert [done.text for done in drafted] == [done.text for done in plain]
        if sampling.logprobs is not None:
            for one, other in zip(plain, drafted, strict=True):
                assert one.logprobs is not None
                assert other.logprobs is not None
                assert len(one.logprobs) == len(other.logprobs)
                for a, b in zip(one.logprobs, other.logprobs, strict=True):
                    assert a.token_id == b.token_id
                    assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        stats = llm.engine.stats()
        assert (stats.num_running, stats.num_held_blocks) == (0, 0)
    if sampling.temperature == 0.0:  # samples of a random model seldom repeat
        assert sum(accepted for _, accepted in EchoDecoder.verified) > 0
    assert any(accepted < drafts for drafts, accepted in EchoDecoder.verified)


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", ["lfm2", "mamba2", "qwen3_next", "granite hybrid", "jamba"])
@pytest.mark.parametrize(
    "options",
    [
        {"prefix_cache": "radix", "page_size": 8, "mamba_track_interval": 8},
        {"max_total_tokens": 160, "page_size": 4, "chunked_prefill_size": 9, "max_mamba_cache_size": 9},
        {"speculative_algorithm": "ngram", "max_running_requests": 3},
    ],
)
def test_states_go_back_to_before_a_rejected_draft(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    architectures.write(tmp_path / name, *architectures.ARCHITECTURES[name])
    base = {"dtype": "float32", "attention_backend": "torch", "max_total_tokens": 4096, "check_blocks": True}
    base |= {"max_running_requests": 4}
    sampling = [
        SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0),
        SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.5, seed=3, top_k=5),
        SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0, grammar=GrammarRequest("regex", "(ab|cde|f)+")),
        SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0),
    ]
    with fwk.LLM(str(tmp_path / name), **base, disable_jump_forward=True) as llm:
        plain = [done.token_ids for done in llm.generate(PROMPTS, sampling)]
    plugins = discover()
    plugins.register(EchoPlugin(), "speculative.echo", "tests", "1")
    given = {**base, "speculative_algorithm": "echo", **options}
    with fwk.LLM(str(tmp_path / name), plugins=plugins, **given) as llm:
        for _ in range(2):  # the second time from states that were kept
            assert [done.token_ids for done in llm.generate(PROMPTS, sampling)] == plain
        stats = llm.engine.stats()
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
    assert (stats.num_running, stats.num_held_blocks) == (0, 0)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "drafts",
    [
        {"speculative_algorithm": "echo"},
        {"speculative_algorithm": "ngram", "speculative_ngram_max_bfs_breadth": 3},
    ],
)
def test_windows_follow_drafts(tmp_path: Path, drafts: dict[str, Any]) -> None:
    """Blocks behind the window go back while drafts are verified, and an accepted branch moves in every table."""
    make_checkpoint(tmp_path / "m", "gemma3", sliding_window=16)
    base = {"dtype": "float32", "attention_backend": "torch", "page_size": 4, "check_blocks": True}
    sampling = [
        SamplingParams(max_tokens=60, ignore_eos=True, temperature=temperature, top_k=3, seed=i)
        for i, temperature in enumerate((0.0, 0.4, 0.0, 0.4))
    ]
    with fwk.LLM(str(tmp_path / "m"), **base, max_total_tokens=4096, disable_hybrid_swa_memory=True) as llm:
        plain = [done.token_ids for done in llm.generate(PROMPTS, sampling)]
    plugins = discover()
    plugins.register(EchoPlugin(), "speculative.echo", "tests", "1")
    with fwk.LLM(str(tmp_path / "m"), plugins=plugins, **base, max_total_tokens=128, **drafts) as llm:
        assert llm.engine.info.num_block_tables > 1
        assert [done.token_ids for done in llm.generate(PROMPTS, sampling)] == plain
        stats = llm.engine.stats()
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens


def test_relaxed_acceptance_keeps_more_and_leaves_greedy_alone(tiny_folder: Path) -> None:
    base = {"load_format": "dummy", "speculative_algorithm": "ngram", "speculative_adaptive": False}
    greedy = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    drawn = SamplingParams(max_tokens=60, temperature=1.0, seed=1, ignore_eos=True, allowed_token_ids=[7, 8, 9, 10])
    found: list[tuple[list[list[int]], float]] = []
    for single in (1.0, 0.2):
        given = {**base, "speculative_accept_threshold_single": single, "max_total_tokens": 4096}
        with fwk.LLM(str(tiny_folder), **given) as llm:
            tokens = [done.token_ids for done in llm.generate(PROMPTS, greedy)]
            before = llm.engine.stats()
            llm.generate(PROMPTS, drawn)
            after = llm.engine.stats()
            accepted = after.accepted_draft_tokens - before.accepted_draft_tokens
            found.append((tokens, accepted / (after.draft_tokens - before.draft_tokens)))
            said = any("leave the model's distribution" in reason for reason in llm.engine.info.reasons)
            assert said == (single < 1)
    assert found[0][0] == found[1][0]
    assert found[1][1] > 1.5 * found[0][1]
    tree = {**base, "speculative_accept_threshold_acc": 0.5, "speculative_ngram_max_bfs_breadth": 2}
    with pytest.raises(ConfigError, match="thresholds of acceptance are for chains"):
        fwk.LLM(str(tiny_folder), **tree)


def test_each_request_knows_its_drafts(tiny_folder: Path) -> None:
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with fwk.LLM(str(tiny_folder), load_format="dummy", speculative_algorithm="ngram", max_total_tokens=4096) as llm:
        done = llm.generate(PROMPTS, sampling)
        stats = llm.engine.stats()
    assert sum(one.draft_tokens for one in done) == stats.draft_tokens > 0
    assert stats.draft_seconds > 0
    assert stats.verify_seconds > 0
    assert sum(one.accepted_draft_tokens for one in done) == stats.accepted_draft_tokens > 0
    assert len({one.draft_tokens for one in done}) > 1
    assert sum(stats.accepted_by_position) == stats.accepted_draft_tokens
    assert stats.verifications >= stats.accepted_by_position[0] >= stats.accepted_by_position[-1] > 0


@pytest.mark.sweep
def test_usage_tells_of_accepted_drafts(spawn: Start) -> None:
    server = spawn("--speculative-algorithm", "ngram")
    body = {"prompt": "x y z x y z x y z", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    details = httpx.post(f"{server.url}/v1/completions", json=body).json()["usage"]["completion_tokens_details"]
    assert set(details) == {"accepted_prediction_tokens", "rejected_prediction_tokens"}
    assert sum(details.values()) > 0
    lines = httpx.post(
        f"{server.url}/v1/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
    ).text.split("\n\n")
    assert json.loads(lines[-3].removeprefix("data: "))["usage"]["completion_tokens_details"] == details
