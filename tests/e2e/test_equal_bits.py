"""Without any option, too, native kernels give a request the same bits: cached or not, alone or in a crowd.

Formats x instruction sets x numbers of requests x cached lengths; one reference each, of a server without a cache.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fwk
import fwk_native as native
from fwk import SamplingParams
from fwk.interfaces.declaration import Facts
from fwk.plugins import discover, find
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
GIVEN: dict[str, dict[str, Any]] = {
    "dense": {},
    "window": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 100},
    "soft cap": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 300,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    },
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
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp("equal") / name.replace(" ", "") for name in GIVEN}
    for name, folder in found.items():
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(MODEL | GIVEN[name]))
    return found


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


@pytest.mark.gate(1)
@pytest.mark.parametrize("isa", isa_params())
@pytest.mark.parametrize("name", [n if n == "bfloat16" else pytest.param(n, marks=pytest.mark.sweep) for n in FORMATS])
def test_a_request_has_the_same_bits(
    folders: dict[str, Path], name: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    assert differ(folders["dense"], 12, **FORMATS[name]) == []


@pytest.mark.sweep
@pytest.mark.parametrize("isa", isa_params())
@pytest.mark.parametrize("model", [name for name in GIVEN if name != "dense"])
def test_of_other_models(folders: dict[str, Path], model: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    assert differ(folders[model], 12) == []


@pytest.mark.parametrize("chunk", [pytest.param(7, marks=pytest.mark.sweep), 100])
def test_however_its_prompt_is_cut(folders: dict[str, Path], chunk: int) -> None:
    assert differ(folders["dense"], 6, chunked_prefill_size=chunk, dtype="float32") == []
    assert differ(folders["window"], 6, chunked_prefill_size=chunk, dtype="float32") == []


@pytest.mark.gate(4)
@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({}, "the same in any batch"),
        ({"speculative_algorithm": "ngram"}, "the same in any batch"),
        ({"quantization": "fp8"}, "quantizer 'fp8' does not promise the same numbers"),
        (
            {"quantization": "int8", "int8_activations": "full"},
            r"quantizer 'int8' leaves .* \(--int8-activations full\)",
        ),
        ({"quantization": "int4", "dtype": "float32"}, "'int4' .* compute in bfloat16, not in float32"),
        (
            {"attention_backend": "torch", "operator_backend": "torch"},
            "attention backend 'torch' .*; set of operators 'torch'",
        ),
        (
            {"speculative_algorithm": "ngram", "speculative_ngram_max_bfs_breadth": 3},
            "'cpu' adds up the keys of a tree",
        ),
    ],
)
def test_a_run_says_whether_it_holds(folders: dict[str, Path], options: dict[str, Any], numbers: str) -> None:
    with fwk.LLM(str(folders["dense"]), **OPTIONS | {"max_total_tokens": 1000} | options) as llm:
        said = llm.engine.info.chosen["numbers"]
    assert re.search(numbers, said)
    assert said.startswith("the same" if numbers.startswith("the same") else "may vary with the batch: ")


def test_windows_hold_with_amx_in_pages_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = find(discover(), "attention", "cpu").declaration
    monkeypatch.setattr(native, "has_tiles", lambda isa: True)
    given = Facts(dtype="bfloat16", features=frozenset({"sliding_window"}), is_deterministic=True)
    assert "so that bits depend on the chunk" in (spec.refusal(given) or "")
    assert spec.refusal(replace(given, block_size=32)) is None
    assert spec.variance(replace(given, is_deterministic=False)) == spec.refusal(given)
