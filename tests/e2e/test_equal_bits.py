"""Without any option, too, native kernels give a request the same bits: cached or not, alone or in a crowd.

Formats x instruction sets x numbers of requests x cached lengths; one reference each, of a server without a cache.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fwk
from fwk import SamplingParams, native
from fwk_kit.testing.serving import TINY
from tests.helpers.isas import isa_params

pytestmark = pytest.mark.skipif(native.refusal() is not None, reason="the native kernels")

MODEL = {
    **TINY,
    "max_position_embeddings": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "fp4": {"quantization": "fp4"},
    "int8 KV": {"dtype": "float32", "kv_cache_dtype": "int8"},
    "fp8 KV": {"kv_cache_dtype": "fp8_e4m3"},
}
LONGEST = 600
"""Of prompts, in tokens: attention reads three ranges of keys."""
CACHED = [0, 16, 112, 256, 384, 592]
CROWDS = [1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 48, 64]
OPTIONS: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "max_total_tokens": 40_000, "device": "cpu"}
ASKED = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("equal") / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


def bits(done: Any) -> Any:
    return done.token_ids, [(entry.logprob, entry.top) for entry in done.logprobs]


def cases(count: int) -> Iterator[tuple[list[int], int, int]]:
    """Prompts, how much of each is cached, and how many others come with it."""
    rng = random.Random(5)
    for i in range(count):
        cached = CACHED[i % len(CACHED)]
        length = rng.randint(max(cached + 1, 8), LONGEST)
        yield [rng.randrange(5, 250) for _ in range(length)], cached, CROWDS[i % len(CROWDS)] - 1


def differ(folder: Path, count: int, **options: Any) -> list[tuple[int, int, int]]:
    """Of some cases those with other bits: the prompt's length, how much of it was cached, and the crowd."""
    given = OPTIONS | options
    rng = random.Random(6)
    asked = list(cases(count))
    with fwk.LLM(str(folder), prefix_cache="none", max_running_requests=1, **given) as llm:
        wanted = [bits(llm.generate([prompt], ASKED)[0]) for prompt, _, _ in asked]
    different: list[tuple[int, int, int]] = []
    with fwk.LLM(str(folder), max_running_requests=64, page_size=16, **given) as llm:
        for (prompt, cached, others), right in zip(asked, wanted, strict=True):
            if cached:
                llm.generate([prompt[:cached]], SamplingParams(max_tokens=1))
            crowd = [[rng.randrange(5, 250) for _ in range(rng.randint(1, 40))] for _ in range(others)]
            at = rng.randint(0, others)
            done = llm.generate([*crowd[:at], prompt, *crowd[at:]], ASKED)[at]
            assert done.cached_tokens >= cached
            if bits(done) != right:
                different.append((len(prompt), cached, 1 + others))
    return different


@pytest.mark.parametrize("isa", isa_params())
@pytest.mark.parametrize("name", [n if n == "bfloat16" else pytest.param(n, marks=pytest.mark.sweep) for n in FORMATS])
def test_a_request_has_the_same_bits(folder: Path, name: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    assert differ(folder, 12, **FORMATS[name]) == []


@pytest.mark.parametrize("chunk", [7, 100])
def test_however_its_prompt_is_cut(folder: Path, chunk: int) -> None:
    assert differ(folder, 6, chunked_prefill_size=chunk) == []
