"""Drafts that a decoder drew leave every sampler setting's distribution as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fwk
from fwk import SamplingParams
from fwk.plugins import discover
from tests.helpers.drawing_decoder import DrawingDecoder, DrawingPlugin
from tests.helpers.tiny import save_llama

ALLOWED = list(DrawingDecoder.tokens)
SAMPLES = 20_000
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.5},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.2},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "presence_penalty": {"presence_penalty": 1.0},
    "frequency_penalty": {"frequency_penalty": 1.0},
    "logit_bias": {"logit_bias": {20: 1.5, 23: -1.0}},
    "bad_words": {"bad_word_token_ids": [[20, 21], [22]]},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": [20], "ignore_eos": False},
    "stop_token_ids": {"stop_token_ids": [20]},
    "typical": {"extra": {"typical_p": 0.7}},
    "top_n_sigma": {"extra": {"top_n_sigma": 1.0}},
    "top_a": {"extra": {"top_a": 0.3}},
    "xtc": {"extra": {"xtc_probability": 0.5, "xtc_threshold": 0.15}},
    "dry": {"extra": {"dry_multiplier": 2.0, "dry_allowed_length": 1}},
    "dynamic_temperature": {"temperature": 1.0, "extra": {"dynatemp_range": 0.6}},
    "mirostat": {"extra": {"mirostat": 2, "mirostat_tau": 1.5, "mirostat_eta": 0.5}},
    "watermark": {"extra": {"watermark": True}},
}
PROMPT = [20, 21, 22, 20]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = save_llama(tmp_path_factory.mktemp("model") / "same", seed=1)
    plugins = discover()
    plugins.register(DrawingPlugin(), "speculative.drawing", "tests", "1")
    # Without a limit of started prompts a step has hundreds of sequences: a CPU would compute ten at a time.
    sizes: dict[str, Any] = {"max_total_tokens": 65536, "max_running_requests": 500, "max_start_tokens": 65536}
    made = [
        fwk.LLM(str(folder), plugins=plugins, **sizes, **options)
        for options in ({}, {"speculative_algorithm": "drawing"})
    ]
    yield made
    for llm in made:
        llm.close()


def outcomes(llm: fwk.LLM, settings: dict[str, Any], seed: int) -> dict[tuple[int, ...], int]:
    """How often each output came, of seeds from ``seed`` on."""
    counts: dict[tuple[int, ...], int] = {}
    for first in range(seed, seed + SAMPLES // 100, 10):
        sampling = [SamplingParams(**settings, seed=first + i) for i in range(10)]
        for done in llm.generate([PROMPT] * 10, sampling, n=100):
            key = tuple(done.token_ids)
            counts[key] = counts.get(key, 0) + 1
    return counts


def distance(first: dict[tuple[int, ...], int], second: dict[tuple[int, ...], int]) -> tuple[float, int]:
    """Chi-squared of two samples of one size against their having one distribution, and the degrees of freedom."""
    pairs = np.array([(first.get(key, 0), second.get(key, 0)) for key in {*first, *second}], float)
    is_rare = pairs.sum(1) < 20
    cells = np.vstack([pairs[~is_rare], pairs[is_rare].sum(0, keepdims=True)])
    cells = cells[cells.sum(1) > 0]
    return float(((cells[:, 0] - cells[:, 1]) ** 2 / cells.sum(1)).sum()), len(cells) - 1


@pytest.mark.sweep
@pytest.mark.parametrize("name", SETTINGS)
def test_the_distribution_is_that_without_drafts(
    name: str, engines: list[fwk.LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """20,000 outputs of three tokens with each engine; all seeds are fixed, so the outcome is."""
    monkeypatch.setattr(DrawingDecoder, "rng", np.random.default_rng(11))
    given: dict[str, Any] = {"max_tokens": 3, "temperature": 1.0, "allowed_token_ids": ALLOWED, "ignore_eos": True}
    given |= SETTINGS[name]
    before = engines[1].engine.stats()
    bare, drawn = (outcomes(llm, given, seed) for llm, seed in zip(engines, (0, 1_000_000), strict=True))
    after = engines[1].engine.stats()
    assert after.accepted_draft_tokens - before.accepted_draft_tokens > 0.1 * SAMPLES
    found, degrees = distance(bare, drawn)
    assert degrees > 3
    assert found < degrees + 3.3 * (2 * degrees) ** 0.5
