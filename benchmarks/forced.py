"""What forced tokens save: JSON by a schema with and without jump-forward, in turns, in one run.

    python -m benchmarks.forced [--model MODEL] [--at-once 1 8] [--tokens 128] [--rounds 5]

Prints a table in Markdown: the median ratio of tokens a second, and how many tokens a step made of each sequence.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import fwk
from benchmarks.constrained import ITEM
from fwk import GrammarRequest, SamplingParams

GRAMMAR = GrammarRequest("json_schema", json.dumps({"type": "array", "items": ITEM, "minItems": 100}))


def run(llm: fwk.LLM, at_once: int, tokens: int, seed: int) -> tuple[float, float]:
    """Tokens a second, and tokens a step and sequence."""
    sampling = [
        SamplingParams(max_tokens=tokens, temperature=0.8, seed=seed + i, ignore_eos=True, grammar=GRAMMAR)
        for i in range(at_once)
    ]
    prompts = [llm.text.chat_ids([{"role": "user", "content": f"Tell me of {i} animals."}]) for i in range(at_once)]
    steps, started = llm.engine.stats().steps, time.perf_counter()
    done = llm.generate(prompts, sampling)
    made = sum(len(each.token_ids) for each in done)
    return made / (time.perf_counter() - started), made / at_once / (llm.engine.stats().steps - steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    engines = [
        fwk.LLM(
            arguments.model, disable_jump_forward=off, max_total_tokens=32768, prefix_cache="none", dtype="bfloat16"
        )
        for off in (True, False)
    ]
    print("| at once | ratio | range | tokens/s | tokens a step |\n| --- | --- | --- | --- | --- |")
    for at_once in arguments.at_once:
        for llm in engines:
            run(llm, at_once, 16, 0)
        found = [[run(llm, at_once, arguments.tokens, 100 * i) for llm in engines] for i in range(arguments.rounds)]
        ratios = sorted(with_[0] / without[0] for without, with_ in found)
        speed = statistics.median(with_[0] for _, with_ in found)
        each = statistics.median(with_[1] for _, with_ in found)
        print(
            f"| {at_once} | {statistics.median(ratios):.2f} | {ratios[0]:.2f} to {ratios[-1]:.2f} "
            f"| {speed:.0f} | {each:.2f} |"
        )
    for llm in engines:
        llm.close()


if __name__ == "__main__":
    main()
