"""What a grammar costs a step: tokens a second with and without one, in turns, in one run.

    python -m benchmarks.constrained [--model MODEL] [--grammar-backend llguidance] [--at-once 8] [--rounds 7]

Each request writes the same number of tokens, sampled: free, as a JSON object with a long string, and as an array of
small objects. All are compiled before anything is timed. Prints a table in Markdown: the median ratio to free text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import fwk
from fwk import GrammarRequest, SamplingParams

LONG = {"type": "object", "properties": {"text": {"type": "string", "minLength": 4000}}, "required": ["text"]}
ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["cat", "dog", "bird"]}},
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
WAYS: dict[str, GrammarRequest | None] = {
    "free": None,
    "a long string": GrammarRequest("json_schema", json.dumps(LONG)),
    "small objects": GrammarRequest("json_schema", json.dumps({"type": "array", "items": ITEM, "minItems": 100})),
}


def rate(llm: fwk.LLM, grammar: GrammarRequest | None, at_once: int, tokens: int, seed: int) -> float:
    """Tokens a second."""
    sampling = [
        SamplingParams(max_tokens=tokens, temperature=0.8, seed=seed + i, ignore_eos=True, grammar=grammar)
        for i in range(at_once)
    ]
    prompts = [llm.text.chat_ids([{"role": "user", "content": f"Tell me of {i} animals."}]) for i in range(at_once)]
    started = time.perf_counter()
    done = llm.generate(prompts, sampling)
    return sum(len(each.token_ids) for each in done) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--grammar-backend", default="auto")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    llm = fwk.LLM(
        arguments.model, grammar_backend=arguments.grammar_backend, max_total_tokens=32768, prefix_cache="none"
    )
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    for grammar in WAYS.values():
        rate(llm, grammar, arguments.at_once, 16, 0)
    for number in range(arguments.rounds):
        for name, grammar in WAYS.items():
            rates[name].append(rate(llm, grammar, arguments.at_once, arguments.tokens, 100 * number))
    llm.close()
    print("| output | ratio | range | tokens/s |\n| --- | --- | --- | --- |")
    for name, found in rates.items():
        ratios = sorted(one / free for one, free in zip(found, rates["free"], strict=True))
        middle, speed = statistics.median(ratios), statistics.median(found)
        print(f"| {name} | {middle:.3f} | {ratios[0]:.2f} to {ratios[-1]:.2f} | {speed:.0f} |")


if __name__ == "__main__":
    main()
