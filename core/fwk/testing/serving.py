"""Engines on a tiny random model: what a plugin is served with."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from fwk.testing.base import installed
from fwk.types import SamplingParams

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "dtype": "float32",
}
"""config.json of the tiny model."""

PROMPTS = [[1, 7, 3, 9] * 9, [5], list(range(40, 75)), [1, 7, 3, 9] * 9 + [8, 8]]
"""A repeated one, one of a single token, and two with a common beginning."""

NUM_TOKENS = 12


def tokens_of(config: dict[str, Any], **options: Any) -> list[list[int]]:
    """The greedy continuations of ``PROMPTS`` by a model of ``config`` with random weights."""
    from fwk import LLM  # noqa: PLC0415 - imports torch

    settings = {"load_format": "dummy", "max_total_tokens": 2048, "max_running_requests": 8, "check_blocks": True}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        with LLM(folder, plugins=installed(), **{**settings, **options}) as llm:
            sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
            together = [done.token_ids for done in llm.generate(PROMPTS, sampling)]
            again = [llm.generate([prompt], sampling)[0].token_ids for prompt in PROMPTS]
    assert again == together, "alone, the prompts get other tokens than together"
    assert all(len(tokens) == NUM_TOKENS for tokens in together)
    return together


@functools.cache
def plain_tokens(config: str, options: str = "{}") -> list[list[int]]:
    """Those of the built-in plugins, for a config.json and options as JSON; computed once for the test run."""
    return tokens_of(json.loads(config), **json.loads(options))
