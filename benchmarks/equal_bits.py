"""Whether a request has the same bits in every server: random settings, each held against each other.

    python -m benchmarks.equal_bits [--settings 64] [--model MODEL] [--quantization int8] [--deterministic] [--seed 1]

Each setting draws what may change neither tokens nor log-probabilities (sizes of chunks, pages and steps, what is
cached, who is served alongside, drafts in chains, how steps are run) and answers the same prompts. N settings are
N (N - 1) / 2 pairs. Prints the settings that differ from the first, and how many pairs differ; the exit code is 1 if
any does.
"""

from __future__ import annotations

import argparse
import random
import sys
from itertools import combinations
from typing import Any

import fwk
from fwk import SamplingParams

PLACES: dict[str, list[Any]] = {
    "page_size": [16, 32, 64],
    "chunked_prefill_size": [7, 64, 300, 2048],
    "max_prefill_tokens": [64, 512, 4096],
    "prefix_cache": ["none", "radix"],
    "speculative_algorithm": ["none", "ngram"],
    "schedule_policy": ["fcfs", "lpm"],
    "disable_cuda_graph": [False, True],
    "disable_overlap_schedule": [False, True],
    "max_running_requests": [1, 4, 48],
}
LENGTHS = [5, 60, 257, 400, 700]
NEW_TOKENS = 16


def draw(rng: random.Random) -> dict[str, Any]:
    return {name: rng.choice(values) for name, values in PLACES.items()}


def answers(rng: random.Random, prompts: list[list[int]], options: dict[str, Any]) -> list[Any]:
    """Tokens and log-probabilities of each prompt, some of it cached, among others."""
    asked = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, logprobs=2)
    found: list[Any] = []
    with fwk.LLM(max_total_tokens=16_384, **options) as llm:
        for prompt in prompts:
            if rng.random() < 0.7:
                llm.generate([prompt[: rng.randint(1, len(prompt))]], SamplingParams(max_tokens=1))
            others = [
                [rng.randrange(500, 9000) for _ in range(rng.randint(1, 200))] for _ in range(rng.choice((0, 1, 7)))
            ]
            at = rng.randint(0, len(others))
            done = llm.generate([*others[:at], prompt, *others[at:]], asked)[at]
            found.append((done.token_ids, [(entry.logprob, entry.top) for entry in done.logprobs or []]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=int, default=64)
    parser.add_argument("--model", default="")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    prompts = [[rng.randrange(500, 9000) for _ in range(length)] for length in LENGTHS]
    fixed: dict[str, Any] = {"quantization": given.quantization, "dtype": given.dtype}
    fixed |= {"enable_deterministic_inference": given.deterministic}
    fixed |= {"model": given.model} if given.model else {}
    found: list[list[Any]] = []
    for i in range(given.settings):
        options = draw(rng)
        found.append(answers(rng, prompts, fixed | options))
        if found[-1] != found[0]:
            print(f"setting {i} differs from the first: {options}", flush=True)
    pairs = list(combinations(found, 2))
    differ = sum(one != other for one, other in pairs)
    print(f"{len(pairs)} pairs of {given.settings} settings, {len(prompts)} requests each: {differ} differ")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
