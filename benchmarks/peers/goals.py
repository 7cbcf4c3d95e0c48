"""What the project set out for on a CPU, as ratios to the peers, and what a set of runs says to each."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.peers.engines import PACKED
from benchmarks.peers.rounds import Record

RATE, TTFT = "tokens/s", "TTFT p50"


@dataclass(frozen=True, slots=True)
class Goal:
    """``ours`` is to be ``factor`` times as fast as ``peers``; 0.7 x their time is a factor of 1 / 0.7.

    peers: names, the best of those that ran counts; empty for all.
    """

    scenario: str
    ours: str
    measure: str
    peers: tuple[str, ...]
    factor: float

    @property
    def wanted(self) -> str:
        return f">= {self.factor:g} x" if self.measure == RATE else f"<= {1 / self.factor:.3g} x"


PACKED_GOALS = {"moe": 1.1, "qwen3next-0.8b": 1.2, "mamba2-370m": 1.2, "lfm2-350m": 1.2}

GOALS = (
    Goal("S1", "fwk bf16", RATE, ("OpenVINO bf16",), 1.2),
    Goal("S1", "fwk bf16", RATE, ("llama.cpp bf16",), 1.6),
    Goal("S1", "fwk 4-bit", RATE, ("llama.cpp Q4_1",), 2.0),
    Goal("S1", "fwk 4-bit", TTFT, (), 1 / 0.8),
    Goal("S2", "fwk bf16", RATE, ("OpenVINO bf16",), 1.6),
    Goal("S2", "fwk bf16", RATE, ("vLLM bf16",), 1.9),
    Goal("S2", "fwk bf16", TTFT, ("OpenVINO bf16", "vLLM bf16"), 1 / 0.7),
    Goal("S2", "fwk int8", RATE, (), 2.5),
    Goal("S3", "fwk bf16", RATE, ("vLLM bf16",), 2.0),
    Goal("S3", "fwk bf16", TTFT, (), 1.0),
    Goal("S4", "fwk bf16", TTFT, ("vLLM bf16",), 1 / 0.75),
    Goal("S4", "fwk int8", TTFT, ("vLLM bf16",), 1 / 0.5),
    *(
        Goal(scenario, f"fwk {size} {ours}", RATE, (f"llama.cpp {size} {theirs}",), factor)
        for scenario, size in (("B1", "1B"), ("T1", "3B"))
        for ours, theirs, factor in (("Q4_K_M", "Q4_K_M", 1.3), ("int8", "Q8_0", 1.6), ("bf16", "BF16", 1.45))
    ),
    Goal("B16", "fwk 1B bf16", RATE, ("vLLM 1B bf16",), 1.2),
    Goal("B16", "fwk 1B int8", RATE, ("vLLM 1B bf16",), 2.2),
    Goal("B16", "fwk 1B Q4_K_M", RATE, ("llama.cpp 1B Q4_K_M",), 2.2),
    Goal("BP", "fwk 1B bf16", TTFT, ("vLLM 1B bf16",), 1.2),
    Goal("BP", "fwk 1B int8", TTFT, ("vLLM 1B bf16",), 2.0),
    Goal("BP", "fwk 1B Q4_K_M", TTFT, ("llama.cpp 1B Q4_K_M",), 2.3),
    Goal("M1", "fwk MoE Q4_K_M", RATE, ("llama.cpp MoE Q4_K_M",), 1.0),
    Goal("M16", "fwk MoE Q4_K_M", RATE, ("llama.cpp MoE Q4_K_M",), 1.0),
    *(
        Goal(
            name, f"fwk packed {shape} {mix}", RATE, (f"llama.cpp packed {shape} {mix}",), PACKED_GOALS.get(shape, 1.05)
        )
        for name, (shape, mix, _) in PACKED.items()
    ),
)


def value(record: Record, measure: str) -> float:
    """Tokens a second, or milliseconds."""
    return record.summary.output_rate if measure == RATE else record.summary.ttft["p50"]


def ratios(records: Sequence[Record], scenario: str, ours: str, theirs: str, measure: str) -> list[float]:
    """How many times as fast ours was, in each round in which both ran."""
    runs = {(r.engine, r.round): value(r, measure) for r in records if r.scenario == scenario}
    pairs = [
        (runs[ours, number], other)
        for (engine, number), other in runs.items()
        if engine == theirs and (ours, number) in runs
    ]
    return [a / b if measure == RATE else b / a for a, b in pairs]


def judge(goal: Goal, records: Sequence[Record]) -> tuple[str, list[float]] | None:
    """The peer it is hardest against, and the ratios to it; None when nothing was measured."""
    names = {r.engine for r in records if r.scenario == goal.scenario and not r.engine.startswith("fwk ")}
    found = {
        name: ratios(records, goal.scenario, goal.ours, name, goal.measure)
        for name in sorted(names)
        if not goal.peers or name in goal.peers
    }
    found = {name: own for name, own in found.items() if own}
    if not found:
        return None
    hardest = min(found, key=lambda name: statistics.median(found[name]))
    return hardest, found[hardest]
