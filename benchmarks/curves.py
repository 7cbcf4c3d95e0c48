"""How cost grows: a decode step with its batch and its context, planning a step with the queue and the prefix cache.

    python -m benchmarks.curves [--parts batch,context,queue,cache] [--steps 20] [--quantization int8]

Prints a page with a Markdown table for each part. Steps are those of ``step_time`` (the engine in this process,
greedy), planning that of ``scheduling_cost`` (no model). "ms a sequence" and "ms for 1,000 tokens more" show where
growth stops being for free.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from benchmarks import scheduling_cost, step_time
from benchmarks.peers.page import machine

if TYPE_CHECKING:
    from collections.abc import Iterator

    import fwk

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8000)
PARTS = ("batch", "context", "queue", "cache")


@contextmanager
def engine(quantization: str | None, num_tokens: int) -> Iterator[fwk.LLM]:
    """The default model, with room for so many tokens and nothing shared between prompts."""
    import fwk

    options = {"quantization": quantization} if quantization else {}
    with fwk.LLM(prefix_cache="none", max_total_tokens=num_tokens, max_running_requests=max(BATCHES), **options) as llm:
        yield llm


def batches(quantization: str | None, steps: int) -> None:
    """A decode step of 1 to 128 sequences of 128 tokens."""
    print("\n| sequences of 128 tokens | step, ms | model | around | ms a sequence |\n| --- | --- | --- | --- | --- |")
    with engine(quantization, max(BATCHES) * (256 + 2 * steps)) as llm:
        for batch in BATCHES:
            row = step_time.measure(llm, batch, steps, 128, {"temperature": 0.0})
            figures = (row["step"], row["model"], row["around"], row["step"] / batch)
            print(f"| {batch} | {' | '.join(f'{ms:.2f}' for ms in figures)} |", flush=True)


def contexts(quantization: str | None, steps: int, counts: Sequence[int] = (1, 8)) -> None:
    """A decode step of 1 and of 8 sequences of 128 to 8,000 tokens."""
    print(
        "\n| sequences | tokens before | step, ms | model | ms for 1,000 tokens more |\n| --- | --- | --- | --- | --- |"
    )
    with engine(quantization, 8 * (max(CONTEXTS) // 4 + 256)) as llm:
        for count in counts:
            base: tuple[int, float] | None = None
            for context in CONTEXTS:
                if count * context > 2 * max(CONTEXTS):
                    continue
                row = step_time.measure(llm, count, steps, context, {"temperature": 0.0})
                slope = "" if base is None else f"{1e3 * (row['step'] - base[1]) / (context - base[0]):.2f}"
                base = base or (context, row["step"])
                print(f"| {count} | {context} | {row['step']:.2f} | {row['model']:.2f} | {slope} |", flush=True)


def planning(policy: str, steps: int, sizes: Sequence[tuple[int, int]]) -> None:
    """Planning a step of 32 sequences, with so many queued and cached."""
    print("\n| policy | queued | cached prefixes | decode, us | turnover, us |\n| --- | --- | --- | --- | --- |")
    for queued, cached in sizes:
        times = (scheduling_cost.measure(policy, 32, queued, cached, steps, turnover=kind) for kind in (False, True))
        print(f"| {policy} | {queued} | {cached} | {' | '.join(f'{us:.0f}' for us in times)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=20, help="steps a figure is the median of (default: %(default)s)")
    parser.add_argument("--quantization", help="as of fwk serve")
    parser.add_argument("--policy", default="fcfs", help="of the planning (default: %(default)s)")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    print(
        f"# How cost grows\n\n```\npython -m benchmarks.curves {' '.join(sys.argv[1:])}\n```\n\nMachine: {machine()}."
    )
    if "batch" in parts:
        batches(arguments.quantization, arguments.steps)
    if "context" in parts:
        contexts(arguments.quantization, arguments.steps)
    if "queue" in parts:
        planning(arguments.policy, 10 * arguments.steps, [(queued, 0) for queued in scheduling_cost.QUEUES])
    if "cache" in parts:
        planning(arguments.policy, 10 * arguments.steps, [(100, cached) for cached in scheduling_cost.CACHED])


if __name__ == "__main__":
    main()
