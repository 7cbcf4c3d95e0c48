"""Whole engines on a tiny model whose KV cache holds two of its prompts, with tiers for the others."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fwk
from fwk import SamplingParams
from fwk.errors import ConfigError, FwkError, PluginError

Tiny = Callable[..., fwk.LLM]
SMALL = {"page_size": 4, "max_total_tokens": 200}
PROMPTS = [[5, 6, 7, 8, *range(10 + 20 * i, 10 + 20 * i + 85)] for i in range(6)]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=8, temperature=1.0, seed=3, top_p=0.9, ignore_eos=True)


def outputs(llm: fwk.LLM, sampling: SamplingParams = GREEDY, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """All at once: they evict each other, are pre-empted, come back."""
    return [done.token_ids for done in llm.generate(prompts, sampling)]


def cached(llm: fwk.LLM) -> list[int]:
    """Cached tokens of each prompt, one after the other."""
    return [llm.generate([prompt], GREEDY)[0].cached_tokens for prompt in PROMPTS]


@pytest.mark.gate(3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hicache_write_policy": "write_back"},
        {"radix_eviction_policy": "lfu"},
        {"chunked_prefill_size": 16},
        {"executor": "threaded"},
        {"executor": "threaded", "hicache_write_policy": "write_back", "schedule_policy": "lpm"},
        {"hicache_ratio": 0.2},
        {"kv_cache_dtype": "int8"},
        {"speculative_algorithm": "ngram"},
    ],
)
def test_output_is_that_without_a_cache(tiny_llm: Tiny, options: dict[str, Any]) -> None:
    plain = {name: options[name] for name in ("kv_cache_dtype",) if name in options}
    reference = tiny_llm(prefix_cache="none", page_size=4, **plain)
    llm = tiny_llm(prefix_cache="hierarchical", **SMALL, **{"hicache_ratio": 8, **options})
    for sampling in (GREEDY, SEEDED):
        for _ in range(2):
            assert outputs(llm, sampling) == outputs(reference, sampling)
    if options.get("hicache_ratio") is None:
        assert llm.engine.stats().restored_prompt_tokens > 0
        assert min(cached(llm)[:4]) >= 80, "evicted long ago, and still there"
        assert outputs(llm) == outputs(reference)
    stats = llm.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_held_blocks) == (0, 0, 0)


def test_without_tiers_nothing_of_it_is_left(tiny_llm: Tiny) -> None:
    """What the test above shows is the tiers' doing."""
    llm = tiny_llm(**SMALL)
    cached(llm)
    assert max(cached(llm)) < 80


def engine(folder: Path, storage: Path, **options: Any) -> fwk.LLM:
    settings = {
        **SMALL, "prefix_cache": "hierarchical", "hicache_storage_backend": ["file"], "check_blocks": True,
        "hicache_storage_dir": str(storage), "hicache_ratio": 0, **options,
    }  # fmt: skip
    return fwk.LLM(str(folder), load_format="dummy", **settings)


@pytest.mark.parametrize("options", [{}, {"executor": "threaded", "hicache_ratio": 1}])
def test_a_new_server_finds_what_the_last_one_left(
    tiny_llm: Tiny, tiny_folder: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    wanted = outputs(tiny_llm(prefix_cache="none", page_size=4))
    with engine(tiny_folder, tmp_path / "kv", **options) as llm:
        assert outputs(llm) == wanted
        assert llm.engine.info.chosen["cache_tiers"] == "host, file"
    with engine(tiny_folder, tmp_path / "kv", **options) as llm:
        assert cached(llm) == [88] * len(PROMPTS)
        assert outputs(llm) == wanted


@pytest.mark.gate(2)
@pytest.mark.parametrize(
    "changed",
    [
        {"json_model_override_args": json.dumps({"rms_norm_eps": 1e-3})},
        {"dtype": "bfloat16"},
        {"page_size": 8},
        {"kv_cache_dtype": "int8"},
        {"quantization": "int8"},
    ],
)
def test_another_models_or_layouts_kv_is_not_found(tiny_folder: Path, tmp_path: Path, changed: dict[str, Any]) -> None:
    with engine(tiny_folder, tmp_path / "kv") as llm:
        outputs(llm)
    with engine(tiny_folder, tmp_path / "kv", **changed) as llm:
        assert llm.generate([PROMPTS[0]], GREEDY)[0].cached_tokens == 0
        assert llm.engine.stats().restored_prompt_tokens == 0


def test_the_bytes_of_the_files_are_the_model(tmp_path: Path, tiny_folder: Path) -> None:
    """Others of the same size and time are another one; the same are the same, wherever they lie."""
    folder, size = tmp_path / "model", 2**20
    folder.mkdir()
    (folder / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())

    def written(weights: bytes) -> None:
        (folder / "weights").write_bytes(weights)
        os.utime(folder / "weights", ns=(1, 1))

    written(bytes(size))
    with engine(folder, tmp_path / "kv") as llm:
        outputs(llm)
    copy = shutil.copytree(folder, tmp_path / "elsewhere", copy_function=shutil.copyfile)
    written(bytes(size // 2) + b"1" + bytes(size // 2 - 1))
    with engine(folder, tmp_path / "kv") as llm:
        assert cached(llm)[0] == 0
    with engine(copy, tmp_path / "kv") as llm:
        assert cached(llm)[0] == 88


def test_damaged_files_change_nothing(tiny_llm: Tiny, tiny_folder: Path, tmp_path: Path) -> None:
    wanted = outputs(tiny_llm(prefix_cache="none", page_size=4))
    with engine(tiny_folder, tmp_path / "kv") as llm:
        outputs(llm)
    for i, path in enumerate(sorted(p for p in (tmp_path / "kv").rglob("*") if p.is_file())):
        raw = path.read_bytes()
        path.write_bytes([raw[:-7], raw[:500] + b"\xff" * 8 + raw[508:], b"", raw, raw][i % 5])
    with engine(tiny_folder, tmp_path / "kv") as llm:
        assert outputs(llm) == wanted
        assert outputs(llm) == wanted


@pytest.mark.sweep
def test_every_rank_keeps_its_own_part(tiny_llm: Tiny, tiny_folder: Path, tmp_path: Path) -> None:
    """What one rank has lost, none has."""
    two = {"tensor_parallel_size": 2, "hicache_ratio": 1, "hicache_storage_prefetch_policy": "wait_complete"}
    wanted = outputs(tiny_llm(prefix_cache="none", page_size=4))
    with engine(tiny_folder, tmp_path / "begin", **two) as llm:
        llm.generate([PROMPTS[0][:5]], SamplingParams(max_tokens=1))
    first_block = {path.name for path in (tmp_path / "begin").rglob("*") if path.is_file()}
    with engine(tiny_folder, tmp_path / "kv", **two) as llm:
        assert outputs(llm) == wanted
    first, second = [path for path in (tmp_path / "kv").iterdir() if path.is_dir()]
    assert {p.name for p in first.rglob("*")}.isdisjoint(p.name for p in second.rglob("*") if p.is_file())
    kept = sorted(path for path in second.rglob("*") if path.is_file() and path.name not in first_block)
    assert len(kept) == 132, "all but the block that all prompts begin with"
    for path in kept[::4]:
        path.unlink()
    with engine(tiny_folder, tmp_path / "kv", **two) as llm:
        assert outputs(llm) == wanted
        stats = llm.engine.stats()
        assert 0 < stats.restored_prompt_tokens < 88 * len(PROMPTS) * 3 // 4
        assert outputs(llm) == wanted


def test_two_servers_on_one_folder(tiny_llm: Tiny, tiny_folder: Path, tmp_path: Path) -> None:
    wanted = outputs(tiny_llm(prefix_cache="none", page_size=4))
    one, other = engine(tiny_folder, tmp_path / "kv"), engine(tiny_folder, tmp_path / "kv")
    with one, other:
        assert outputs(one) == outputs(other) == outputs(one) == outputs(other) == wanted
        assert other.engine.stats().restored_prompt_tokens > 0


def test_namespaces_are_kept_apart_in_files_too(tiny_folder: Path, tmp_path: Path) -> None:
    def run(llm: fwk.LLM, salt: str) -> int:
        request = fwk.types.Request(  # type: ignore[attr-defined]
            request_id=f"r{salt}", prompt_token_ids=PROMPTS[0], sampling=GREEDY, cache_namespace=salt
        )
        assert llm.engine.add(request) == []
        events = [event for _ in range(40) for event in llm.engine.step()]
        assert events[-1].finish_reason == "length"
        return events[-1].cached_tokens

    for salt, first in (("mine", 0), ("yours", 0), ("mine", 88)):
        with engine(tiny_folder, tmp_path / "kv") as llm:
            assert run(llm, salt) == first
    written = b"".join(path.read_bytes() for path in (tmp_path / "kv").rglob("*") if path.is_file())
    assert b"mine" not in written


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cache_tiers": ["file"]}, ConfigError, "the prefix cache 'radix' uses no tiers"),
        ({"hicache_ratio": 2}, ConfigError, "--hicache-ratio belongs to cache_tiers.host, which is not selected"),
        ({"hicache_write_policy": "write_back"}, ConfigError, "belongs to cache.hierarchical, which is not selected"),
        (
            {"prefix_cache": "hierarchical", "hicache_storage_dir": "/tmp/x"},
            ConfigError,
            "--hicache-storage-dir belongs to cache_tiers.file, which is not selected",
        ),
        ({"prefix_cache": "hierarchical", "cache_tiers": ["flie"]}, PluginError, "unknown cache tier 'flie'"),
        ({"prefix_cache": "hierarchical", "hicache_size": 0}, ConfigError, "--hicache-size: Input should be greater"),
        ({"prefix_cache": "hierarchical", "hicache_size": 1e-6}, ConfigError, "has no room for one block"),
        ({"prefix_cache": "hierarchical", "hicache_size": 1e5}, ConfigError, "GiB of memory are free"),
        ({"radix_eviction_policy": "fifo"}, ConfigError, "--radix-eviction-policy: Input should be 'lru' or 'lfu'"),
        ({"prefix_cache": "none", "radix_eviction_policy": "lfu"}, ConfigError, "which is not selected"),
        ({"prefix_cache": "radix", "enable_hierarchical_cache": True}, ConfigError, "both set --prefix-cache"),
    ],
)
def test_what_cannot_be_is_said_before_serving(
    tiny_folder: Path, options: dict[str, Any], error: type[FwkError], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        fwk.LLM(str(tiny_folder), load_format="dummy", **SMALL, **options)
    assert "\n" not in str(raised.value)
