"""How many sequences run at once in the same memory, with block tables of their own for layers with a window.

Usage: ``python -m benchmarks.window_groups [--model gemma3-270m] [--tokens 8192] [--prompt 1000 3000]``.
Prints, with and without ``--disable-hybrid-swa-memory``, the most sequences that ran at once of 24 asked for, their K/V
in MiB, and the time of all.
"""

from __future__ import annotations

import argparse
import time

import fwk
from fwk import SamplingParams

NUM_REQUESTS = 24


def measure(model: str, tokens: int, length: int, is_one: bool) -> tuple[int, int, float]:
    """The most sequences at once, pre-emptions, and seconds."""
    with fwk.LLM(model, max_total_tokens=tokens, disable_hybrid_swa_memory=is_one, prefix_cache="none") as llm:
        prompts = [[2, *((7919 * i + 31 * j) % 5000 + 300 for j in range(length - 1))] for i in range(NUM_REQUESTS)]
        most, step = 0, llm.engine.step

        def watched():  # type: ignore[no-untyped-def]
            nonlocal most
            events = step()
            most = max(most, llm.engine.stats().num_running)
            return events

        llm.engine.step = watched  # type: ignore[method-assign]
        start = time.perf_counter()
        llm.generate(prompts, SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True))
        return most, llm.engine.stats().preemptions, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gemma3-270m")
    parser.add_argument("--tokens", type=int, default=8_192)
    parser.add_argument("--prompt", type=int, nargs="+", default=[1_000, 3_000])
    arguments = parser.parse_args()
    print("prompt | tables | most at once | pre-emptions | s")
    for length in arguments.prompt:
        for is_one in (True, False):
            most, preemptions, seconds = measure(arguments.model, arguments.tokens, length, is_one)
            print(f"{length} | {'one' if is_one else 'by group'} | {most} | {preemptions} | {seconds:.1f}", flush=True)


if __name__ == "__main__":
    main()
