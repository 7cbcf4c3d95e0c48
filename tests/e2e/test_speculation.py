"""Drafts go through the whole engine and change nothing but the number of steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

import fwk
from fwk import SamplingParams
from fwk.plugins import discover
from tests.helpers.scripted_decoder import EchoDecoder, EchoPlugin
from tests.helpers.servers import Start

PROMPTS = [[7, 8, 9] * 6, [5] * 20, list(range(10, 50)), [100, 101, 100, 101, 100]]


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


def test_each_request_knows_its_drafts(tiny_folder: Path) -> None:
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with fwk.LLM(str(tiny_folder), load_format="dummy", speculative_algorithm="ngram", max_total_tokens=4096) as llm:
        done = llm.generate(PROMPTS, sampling)
        stats = llm.engine.stats()
    assert sum(one.draft_tokens for one in done) == stats.draft_tokens > 0
    assert sum(one.accepted_draft_tokens for one in done) == stats.accepted_draft_tokens > 0
    assert len({one.draft_tokens for one in done}) > 1


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
