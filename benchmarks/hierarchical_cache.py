"""Time to the first token of a long prompt that returns after its K/V were evicted: computed again, or brought back.

    python -m benchmarks.hierarchical_cache [--model FOLDER] [--prompt-tokens 1024] [--turns 5] [--seconds 120]

The KV cache holds one prompt. Two prompts take turns, so that each evicts the other. The engine runs in this process.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import fwk
from fwk import SamplingParams


def measure(options: dict[str, Any], num_tokens: int, turns: int, deadline: float) -> tuple[list[float], int]:
    """Seconds to the first token of returning prompts, and the tokens brought back for all of them."""
    seconds: list[float] = []
    with fwk.LLM(max_total_tokens=num_tokens + 64, **options) as llm:
        vocab = llm.engine.info.vocab_size
        prompts = [[(i * 7919 + j * 104729) % (vocab - 300) + 200 for j in range(num_tokens)] for i in range(2)]
        first = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        for prompt in prompts:
            llm.generate([prompt], first)
        before = llm.engine.stats().restored_prompt_tokens
        for _ in range(turns):
            for prompt in prompts:
                if time.monotonic() > deadline and seconds:
                    break
                started = time.perf_counter()
                llm.generate([prompt], first)
                seconds.append(time.perf_counter() - started)
        return seconds, llm.engine.stats().restored_prompt_tokens - before


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=120.0, help="start nothing new after that time")
    arguments = parser.parse_args()
    common: dict[str, Any] = {"dtype": arguments.dtype, "load_format": arguments.load_format}
    if arguments.model:
        common["model"] = arguments.model
    end = time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory() as folder:
        tiered: dict[str, Any] = {"prefix_cache": "hierarchical", "hicache_write_policy": "write_back"}
        files = {"cache_tiers": ["file"], "hicache_storage_dir": f"{folder}/kv", "hicache_ratio": 0}
        cases: list[tuple[str, dict[str, Any]]] = [
            ("computed again (radix)", {"prefix_cache": "radix"}),
            ("brought back from host memory", {**tiered, "hicache_ratio": 4}),
            ("brought back from files", {**tiered, **files}),
        ]
        print("| returning prompt | median ms | ratio | restored tokens a turn |\n| --- | --- | --- | --- |")
        reference = 0.0
        for i, (name, options) in enumerate(cases):
            deadline = end - arguments.seconds * (len(cases) - 1 - i) / len(cases)
            seconds, restored = measure({**common, **options}, arguments.prompt_tokens, arguments.turns, deadline)
            median = statistics.median(seconds)
            reference = reference or median
            print(
                f"| {name} | {1e3 * median:.1f} | {reference / median:.1f} | {restored // len(seconds)} |", flush=True
            )


if __name__ == "__main__":
    main()
