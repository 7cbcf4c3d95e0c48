"""--enable-deterministic-inference: the same bits in any batch, chunk and cache, or a sentence."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import fwk
import fwk_native as native
from fwk import SamplingParams
from fwk.errors import ConfigError, FwkError, PluginError
from fwk_kit.testing.serving import TINY
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.tiny import routed_in_float32

needs_kernels = pytest.mark.skipif(native.refusal() is not None, reason="the native kernels")

DENSE = {**TINY, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
EXPERTS = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}
MODELS = {"dense": DENSE, "experts": EXPERTS, "router": routed_in_float32(EXPERTS)}
PROMPT = [(7 * i) % 250 + 5 for i in range(330)]
"""Longer than a range of keys that attention would read by itself."""
OTHERS = [[(11 * i + k) % 250 + 5 for i in range(20 + 37 * k)] for k in range(5)]
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "enable_deterministic_inference": True,
}
WAYS: dict[str, dict[str, Any]] = {
    "alongside others": {},
    "in chunks": {"chunked_prefill_size": 50},
    "in chunks of few rows": {"chunked_prefill_size": 7},
    "in uneven chunks alongside others": {"chunked_prefill_size": 33, "max_prefill_tokens": 64},
    "from the prefix cache": {},
    "in larger pages": {"page_size": 32},
    "with drafts": {"speculative_algorithm": "ngram"},
    "operator by operator": {"disable_cuda_graph": True},
}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("dense", {"dtype": "float32"}),
    "bfloat16": ("dense", {"dtype": "bfloat16"}),
    "int8": ("dense", {"dtype": "bfloat16", "quantization": "int8"}),
    "int4, int8 KV": ("dense", {"dtype": "bfloat16", "quantization": "int4", "kv_cache_dtype": "int8"}),
    "experts": ("experts", {"dtype": "bfloat16"}),
    "a router in float32": ("router", {"dtype": "bfloat16"}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for name, config in MODELS.items():
        found[name] = tmp_path_factory.mktemp("deterministic") / name
        found[name].mkdir()
        (found[name] / "config.json").write_text(json.dumps(config))
    return found


def bits(folder: Path, way: str, temperature: float = 0.0, **options: Any) -> tuple[list[int], list[float]]:
    """A request's tokens and log-probabilities."""
    sampling = SamplingParams(max_tokens=12, temperature=temperature, seed=3, ignore_eos=True, logprobs=1)
    with fwk.LLM(str(folder), **OPTIONS | options) as llm:
        if "cache" in way:
            llm.generate([PROMPT[:200]], SamplingParams(max_tokens=1))
        done = llm.generate([PROMPT, *OTHERS] if "others" in way else [PROMPT], sampling)[0]
        assert (done.cached_tokens > 0) == ("cache" in way)
        return done.token_ids, [entry.logprob for entry in done.logprobs or []]


@cache
def alone(folder: Path, options: str) -> tuple[list[int], list[float]]:
    return bits(folder, "", **json.loads(options))


@pytest.mark.gate(4)
@needs_kernels
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "run", [pytest.param(name, marks=pytest.mark.sweep if name != "bfloat16" else ()) for name in RUNS]
)
def test_the_bits_are_the_same(folders: dict[str, Path], run: str, way: str) -> None:
    model, options = RUNS[run]
    assert bits(folders[model], way, **options | WAYS[way]) == alone(folders[model], json.dumps(options))


@needs_kernels
def test_sampled_tokens_are_the_same(folders: dict[str, Path]) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "temperature": 0.8}
    wanted = bits(folders["dense"], "", **settings)
    assert bits(folders["dense"], "alongside others", chunked_prefill_size=21, **settings) == wanted
    assert wanted[0] != bits(folders["dense"], "", dtype="float32")[0], "nothing was sampled"


@pytest.mark.gate(2)
@needs_kernels
@pytest.mark.parametrize("run", RUNS)
def test_on_a_cpu_the_option_changes_no_bit(folders: dict[str, Path], run: str) -> None:
    model, options = RUNS[run]
    given = {**options, "enable_deterministic_inference": False}
    wanted = alone(folders[model], json.dumps(options))
    assert bits(folders[model], "alongside others", **given) == wanted
    assert bits(folders[model], "with drafts", speculative_algorithm="ngram", **given) == wanted


CANNOT = r"does not promise the same numbers whatever is computed alongside \(--enable-deterministic-inference\)"


@needs_kernels
@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"attention_backend": "torch"}, PluginError, rf"'torch' .* {CANNOT}; of its family cpu and triton can"),
        (
            {"quantization": "fp8"},
            PluginError,
            rf"'fp8' .* {CANNOT}; of its family fp4 and gguf and int4 and int8 and none can",
        ),
        ({"quantization": "int8"}, PluginError, "native kernels only, which compute in bfloat16, not in float32"),
        (
            {"quantization": "int8", "int8_activations": "full", "dtype": "bfloat16"},
            ConfigError,
            "--int8-activations full is computed by torch",
        ),
        ({"enable_lora": True}, PluginError, f"{CANNOT}; of its family none can"),
        ({"tensor_parallel_size": 2, "executor": "processes"}, ConfigError, "ranks add up their parts"),
        ({"decode_attention_backend": "torch"}, PluginError, "does not promise the same numbers"),
        (
            {"speculative_algorithm": "ngram", "speculative_ngram_max_bfs_breadth": 3},
            PluginError,
            "where they lie in the tree, so that bits depend on the other drafts: they hold for drafts in chains",
        ),
    ],
)
def test_what_does_not_hold_it_is_refused(
    folders: dict[str, Path], options: dict[str, Any], error: type[FwkError], why: str
) -> None:
    with pytest.raises(error, match=why):
        fwk.LLM(str(folders["dense"]), **OPTIONS | {"dtype": "float32"} | options)


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("lfm2", {}, "has recurrent layers, whose states depend on how a prompt is cut"),
    ],
)
def test_models_that_do_not_hold_it_are_refused(tmp_path: Path, kind: str, changes: dict[str, Any], why: str) -> None:
    make_checkpoint(tmp_path / "m", kind, **changes)
    with pytest.raises(FwkError, match=why):
        fwk.LLM(str(tmp_path / "m"), **OPTIONS | {"load_format": "auto", "dtype": "float32"})
