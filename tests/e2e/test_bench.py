"""What `fwk bench roofline` says a model must read and compute, against its shape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import fwk
from fwk_kit.bench.roofline import Machine, Phase, kv_bytes, measure_phases, model_size, table
from tests.helpers.architectures import SMALL, write
from tests.helpers.tiny import TINY


def test_a_models_size_is_that_of_its_matrices(tiny_llm: Callable[..., fwk.LLM]) -> None:
    llm = tiny_llm()
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    hidden, ffn, heads, kv = (TINY[name] for name in names)
    size = hidden // heads
    layer = hidden * size * (heads + 2 * kv) + heads * size * hidden + 3 * hidden * ffn
    macs = TINY["num_hidden_layers"] * layer + hidden * TINY["vocab_size"]
    nbytes, found = model_size(llm)
    assert found == macs
    assert 4 * macs <= nbytes < 4.4 * macs  # float32, and what kernels pad
    assert kv_bytes(llm) == TINY["num_hidden_layers"] * 2 * kv * size * 4


@pytest.mark.parametrize("runner", ["torch", "cpu"])
def test_a_step_reads_the_experts_its_tokens_choose(runner: str, tmp_path: Path) -> None:
    write(tmp_path, "olmoe", {"num_experts": 8, "num_experts_per_tok": 2})
    with fwk.LLM(str(tmp_path), dtype="float32", max_total_tokens=256, moe_runner_backend=runner) as llm:
        sizes = {rows: model_size(llm, rows) for rows in (1, 2, 1000)}
    expert, layers = 3 * SMALL["hidden_size"] * SMALL["intermediate_size"], SMALL["num_hidden_layers"]
    assert [macs for _, macs in sizes.values()] == [sizes[1][1]] * 3
    whole = sizes[1000][0]
    assert whole - sizes[1][0] == pytest.approx(4 * layers * 6 * expert, rel=0.05)  # two of eight, in float32
    assert whole - sizes[2][0] == pytest.approx(4 * layers * 8 * 0.75**2 * expert, rel=0.05)


def test_phases_name_what_was_run_and_leave_nothing_behind(tiny_llm: Callable[..., fwk.LLM]) -> None:
    llm = tiny_llm()
    phases = measure_phases(llm, context=8, steps=3, batches=(1, 2), prompt=16)
    assert [phase.name for phase in phases] == ["decode, batch 1", "decode, batch 2", "prefill, 16 tokens"]
    assert phases[1].operations == 2 * phases[0].operations
    assert all(phase.seconds > 0 for phase in phases)
    assert llm.engine.stats().num_running == 0
    assert "| decode, batch 2 |" in table(Machine(1e9, {1: 1e9, 32: 4e9}), phases)


def test_a_bound_is_the_larger_of_reading_and_computing() -> None:
    machine = Machine(bandwidth=1e9, rates={1: 1e9, 8: 4e9})
    assert Phase("", read=2 * 10**9, operations=10**9, rows=1, seconds=3).bound(machine) == pytest.approx(2)
    assert Phase("", read=10**9, operations=8 * 10**9, rows=9, seconds=3).bound(machine) == pytest.approx(2)
