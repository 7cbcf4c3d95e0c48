"""What forced tokens save: JSON by a schema with and without jump-forward, in turns, in one run.

    python -m benchmarks.forced [--model MODEL] [--at-once 1 8] [--tokens 128] [--rounds 5]
    python -m benchmarks.forced --scenario S5 [--no-whitespace] [--prefix-cache radix]

Without a scenario, arrays of small objects, sampled; S5 is that of ``fwk bench``: 16 chats, greedy. Prints a table in
Markdown: the median ratio of tokens a second, tokens a step and sequence (with prompts' steps), and the milliseconds of
a step, without and with jump-forward.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import fwk
from benchmarks.constrained import ITEM
from fwk import GrammarRequest, SamplingParams
from fwk_kit.bench.workload import PERSON, WORKLOADS

ITEMS = GrammarRequest("json_schema", json.dumps({"type": "array", "items": ITEM, "minItems": 100}))
PEOPLE = GrammarRequest("json_schema", json.dumps(PERSON))
S5 = WORKLOADS["S5"]
Asked = tuple[list[str], list[SamplingParams]]


def items(at_once: int, tokens: int, turn: int) -> Asked:
    """Prompts and how each is answered."""
    sampling = [
        SamplingParams(max_tokens=tokens, temperature=0.8, seed=100 * turn + i, ignore_eos=True, grammar=ITEMS)
        for i in range(at_once)
    ]
    return [f"Tell me of {i} animals." for i in range(at_once)], sampling


def people(_at_once: int, _tokens: int, turn: int) -> Asked:
    """As ``items``, the requests of S5."""
    numbers = range(turn * 1000, turn * 1000 + S5.num_requests)
    prompts = [
        f"Give me the data of an imaginary person number {i} as JSON with name, age, city, likes_music."
        for i in numbers
    ]
    return prompts, [SamplingParams(max_tokens=S5.output_len, temperature=0.0, grammar=PEOPLE) for _ in numbers]


def run(llm: fwk.LLM, asked: Asked, at_once: int) -> tuple[float, float, float]:
    """Tokens a second; tokens a step and sequence; milliseconds a step."""
    prompts = [llm.text.chat_ids([{"role": "user", "content": text}]) for text in asked[0]]
    steps, made, started = llm.engine.stats().steps, 0, time.perf_counter()
    for i in range(0, len(prompts), at_once):
        made += sum(len(each.token_ids) for each in llm.generate(prompts[i : i + at_once], asked[1][i : i + at_once]))
    seconds, steps = time.perf_counter() - started, llm.engine.stats().steps - steps
    return made / seconds, made / at_once / steps, 1000 * seconds / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--scenario", choices=["items", "S5"], default="items")
    parser.add_argument("--no-whitespace", action="store_true", help="--constrained-json-disable-any-whitespace")
    parser.add_argument("--prefix-cache", default="none")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    ask = people if arguments.scenario == "S5" else items
    options: dict[str, Any] = {"constrained_json_disable_any_whitespace": True} if arguments.no_whitespace else {}
    options |= {"max_total_tokens": 32768, "prefix_cache": arguments.prefix_cache, "dtype": "bfloat16"}
    engines = [fwk.LLM(arguments.model, disable_jump_forward=off, **options) for off in (True, False)]
    print("| at once | ratio | range | tokens/s | tokens a step | ms a step |\n| --- | --- | --- | --- | --- | --- |")
    for at_once in arguments.at_once:
        for llm in engines:
            run(llm, ask(at_once, 16, 0), at_once)
        found = [
            [run(llm, ask(at_once, arguments.tokens, 1 + i), at_once) for llm in engines]
            for i in range(arguments.rounds)
        ]
        ratios = sorted(on[0] / off[0] for off, on in found)
        speed, *both = (
            [statistics.median(of[place] for of in some) for some in zip(*found, strict=True)] for place in range(3)
        )
        shown = " | ".join(f"{off:.2f}, {on:.2f}" for off, on in both)
        print(
            f"| {at_once} | {statistics.median(ratios):.2f} | {ratios[0]:.2f} to {ratios[-1]:.2f} "
            f"| {speed[1]:.0f} | {shown} |",
            flush=True,
        )
    for llm in engines:
        llm.close()


if __name__ == "__main__":
    main()
