"""The memory of a device: the KV cache is as large as weights, the largest step and captured graphs leave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.helpers.interpreted import interpreted
from tests.helpers.pretend_cuda import JOURNAL, flashinfer_stand_in, pretended, triton_kernels
from tests.helpers.pretend_cuda.device import Pretended
from tests.helpers.pretend_cuda.tensors import MEMORY

import fwk
from fwk import SamplingParams
from fwk.errors import ConfigError
from fwk.interfaces.device import Taken
from fwk.types import Batch
from fwk.worker.kv.memory_profile import MemoryProfile
from fwk.worker.runner.model_runner import ModelRunner
from fwk_lora.feature import AdapterPlace

MEBI = 2**20
TOTAL = 64 * MEBI
OPTIONS: dict[str, Any] = {
    "device": "pretended",
    "load_format": "dummy",
    "dtype": "float32",
    "max_running_requests": 4,
    "max_prefill_tokens": 64,
    **{name: "torch" for name in ("attention_backend", "operator_backend", "sampling_backend")},
}
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pretended, "total", TOTAL)


@contextmanager
def served(folder: Path, **options: Any) -> Iterator[fwk.LLM]:
    with pretended() as plugins, fwk.LLM(str(folder), plugins=plugins, **OPTIONS | options) as llm:
        yield llm


def measured(folder: Path, **options: Any) -> tuple[dict[str, int], int]:
    """What an engine, which is gone then, says of its memory, and its blocks."""
    with served(folder, **options) as llm:
        return llm.engine.info.memory, llm.engine.info.num_blocks


def test_what_the_largest_step_needs_is_left_free(tiny_folder: Path) -> None:
    with served(tiny_folder, mem_fraction_static=0.5) as llm:
        memory = llm.engine.info.memory
        assert memory["total"] == TOTAL
        assert min(memory["weights"], memory["step"], memory["kv_cache"]) > 0
        assert memory["weights"] + memory["step"] + memory["graphs"] + memory["kv_cache"] <= TOTAL // 2
        left = TOTAL // 2 - memory["weights"] - memory["step"] - memory["kv_cache"]
        assert left < 2 * memory["kv_cache"] // llm.engine.info.num_blocks, "a block more would have found room"
        MEMORY.trim()
        prompts = [[slot + 1] * 16 for slot in range(4)]
        llm.generate(prompts, SamplingParams(max_tokens=4, temperature=0.8, top_p=0.9, logprobs=5, ignore_eos=True))
        assert MEMORY.most <= TOTAL // 2, "a step took more than was left for it"
    assert JOURNAL.faults == []


@pytest.mark.sweep
def test_a_larger_step_leaves_fewer_blocks(tiny_folder: Path) -> None:
    small, many = measured(tiny_folder, mem_fraction_static=0.5)
    large, few = measured(tiny_folder, mem_fraction_static=0.5, max_prefill_tokens=512)
    assert large["step"] > 2 * small["step"]
    assert few < many


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    "option", [{"speculative_algorithm": "ngram"}, {"enable_lora": True, "max_loras_per_batch": 3}]
)
def test_drafts_and_adapters_are_part_of_the_largest_step(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, option: dict[str, Any]
) -> None:
    batches: list[Batch] = []
    real = ModelRunner.launch

    def launch(self: ModelRunner, batch: Batch) -> Any:
        batches.append(batch)
        return real(self, batch)

    monkeypatch.setattr(ModelRunner, "launch", launch)
    with served(tiny_folder, mem_fraction_static=0.5, **option) as llm:
        prompts, decode, longest = batches
        assert [len(batch.sequences) for batch in batches] == [4, 4, 1]
        assert sum(s.num_new_tokens for s in prompts.sequences) == 64
        assert all(s.samples for batch in batches for s in batch.sequences)
        assert longest.new[0].num_computed_tokens + 64 == len(longest.new[0].token_ids)
        if "enable_lora" in option:
            told = [msgspec.msgpack.decode(new.features["lora"], type=AdapterPlace) for new in prompts.new]
            assert {place.slot for place in told} == {0, 1, 2}
        else:
            assert all(s.draft_token_ids for s in decode.sequences)
        assert llm.generate([[1, 2, 1, 2, 1, 2]], GREEDY)[0].token_ids


def test_the_rehearsal_changes_no_token(tiny_folder: Path) -> None:
    prompts = [[1, 7, 3, 9] * 9, list(range(40, 75))]
    sampled = SamplingParams(max_tokens=6, temperature=0.9, seed=3, presence_penalty=0.5, ignore_eos=True)
    options = OPTIONS | {"device": "cpu", "max_total_tokens": 2048}
    with fwk.LLM(str(tiny_folder), **options) as llm:
        wanted = [[done.token_ids for done in llm.generate(prompts, each)] for each in (GREEDY, sampled)]
    with served(tiny_folder, max_total_tokens=2048) as llm:
        assert [[done.token_ids for done in llm.generate(prompts, each)] for each in (GREEDY, sampled)] == wanted


@pytest.mark.sweep
@interpreted
def test_graphs_are_estimated_from_the_two_largest(tiny_folder: Path) -> None:
    with triton_kernels(), served(tiny_folder, mem_fraction_static=0.5, attention_backend="triton") as llm:
        assert llm.engine.info.chosen["step"].startswith("captured")
        memory = llm.engine.info.memory
        assert memory["graphs"] > 0
        assert MEMORY.now <= memory["weights"] + memory["graphs"] + memory["kv_cache"] + MEBI // 4


def test_wrappers_of_captured_steps_are_measured(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's have 8 MiB each: what those of all sizes take was taken after the KV cache had its size."""
    monkeypatch.setattr(Pretended, "total", 2**30)
    options = {"attention_backend": "flashinfer-stand-in", "max_running_requests": 24, "max_total_tokens": 512}
    with flashinfer_stand_in(), served(tiny_folder, **options) as llm:
        assert llm.engine.info.chosen["step"].startswith("captured (next tokens of 6 numbers")
        memory = llm.engine.info.memory
        assert MEMORY.now <= memory["weights"] + memory["graphs"] + memory["kv_cache"] + MEBI


@pytest.mark.sweep
def test_too_little_is_told_with_all_the_numbers(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pretended, "others", 20 * MEBI)
    memory, _ = measured(tiny_folder, mem_fraction_static=0.9)
    assert memory["others"] == 20 * MEBI
    fraction = (20 * MEBI + memory["weights"] + memory["step"] // 2) / TOTAL
    with pytest.raises(ConfigError) as caught:
        measured(tiny_folder, mem_fraction_static=round(fraction, 3))
    words = str(caught.value)
    for part in (
        f"--mem-fraction-static {round(fraction, 3):g} of 64 MiB",
        "(20 by others, ",
        "by weights and buffers) and ",
        " for the largest step must stay free: nothing is left, and the smallest KV cache takes ",
        "lower --max-prefill-tokens, --max-running-requests or --cuda-graph-max-bs, or take a smaller model",
    ):
        assert part in words
    del caught  # with what the engine had
    enough = float(words.partition("raise it to ")[2].split()[0])
    assert measured(tiny_folder, mem_fraction_static=enough)[1] >= 1
    with pytest.raises(ConfigError):
        measured(tiny_folder, mem_fraction_static=round(enough - 0.002, 3))


def test_what_was_asked_for_leaves_room_for_the_step(tiny_folder: Path) -> None:
    memory, _ = measured(tiny_folder, max_total_tokens=16)
    room = TOTAL - memory["weights"] - memory["step"] // 2
    tokens = room // (memory["kv_cache"] // 16)
    with pytest.raises(ConfigError, match=r"of which \d+ MiB for the largest step must stay free"):
        measured(tiny_folder, max_total_tokens=tokens)


@pytest.mark.gate(1)
@pytest.mark.parametrize(("reserve", "most"), [(24 * MEBI, 34 * MEBI), (-20 * MEBI, 44 * MEBI)])
def test_a_reserve_in_bytes(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, reserve: int, most: int) -> None:
    monkeypatch.setattr(Pretended, "others", 10 * MEBI)
    with served(tiny_folder, device_reserve_memory_bytes=reserve) as llm:
        memory = llm.engine.info.memory
        used = memory["others"] + memory["weights"] + memory["step"] + memory["kv_cache"]
        block = memory["kv_cache"] // llm.engine.info.num_blocks
        assert most - 2 * block < used <= most


@pytest.mark.sweep
def test_a_reserve_that_is_too_small_says_what_would_do(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pretended, "others", 10 * MEBI)
    for reserve in (MEBI // 64, -60 * MEBI):
        with pytest.raises(ConfigError, match=f"--device-reserve-memory-bytes {reserve} allows ") as caught:
            measured(tiny_folder, device_reserve_memory_bytes=reserve)
        enough = int(str(caught.value).partition("make it ")[2].split()[0])
        del caught
        assert (enough > 0) == (reserve > 0)


def test_a_reserve_on_the_host_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="--device-reserve-memory-bytes: this device has no memory but the host's"):
        fwk.LLM(str(tiny_folder), load_format="dummy", device="cpu", device_reserve_memory_bytes=2**30)
    others: list[dict[str, Any]] = [{"max_total_tokens": 64}, {"mem_fraction_static": 0.5}]
    for other in others:
        with pytest.raises(ConfigError, match=r"device-reserve-memory-bytes.*does nothing alongside --m"):
            fwk.LLM(str(tiny_folder), load_format="dummy", device="cpu", device_reserve_memory_bytes=2**30, **other)


def test_a_device_that_counts_nothing_is_served_all_the_same(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Pretended, "taken", lambda self, device: None)
    with served(tiny_folder, mem_fraction_static=0.5) as llm:
        assert llm.engine.info.memory["step"] == 0
    assert "the memory of the largest step was not measured: the device counts none" in caplog.messages


def test_a_step_that_does_not_fit_is_a_sentence(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(self: ModelRunner, batch: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 3 GiB\nmore")

    monkeypatch.setattr(ModelRunner, "launch", no_room)
    with pytest.raises(ConfigError, match=r"the largest step, 64 tokens of 4 sequences, .*3 GiB\): lower --max-"):
        measured(tiny_folder)


class Counting:
    """A device whose allocator has taken what it is told."""

    def __init__(self) -> None:
        self.now, self.most = 100, 100

    def trim(self, where: Any) -> None:
        self.most = self.now

    def taken(self, where: Any) -> Taken:
        return Taken(self.now, self.most)


def test_what_a_step_leaves_behind_is_not_counted_twice() -> None:
    device: Any = Counting()

    def run() -> None:
        device.now, device.most = 130, 200

    assert MemoryProfile(device, None, None).most(run) == 70  # type: ignore[arg-type]
