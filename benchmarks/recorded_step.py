"""Decode steps and prompts computed operator by operator and as a recorded tape, in turns.

    python -m benchmarks.recorded_step [--ways "native operators,recorded"] [--batches 1,8,32] [--rounds 5] [--steps 20]
        [--prompts 16,128,512] [--model gemma3-270m]

Another way is "whole head", of unquantised weights alone: greedy steps compute all logits, too.

One process holds an engine for each way; a round measures every way once, so that what else the machine does hits all.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from contextlib import ExitStack
from typing import Any

import fwk
from benchmarks.prompt_time import measure as measure_prompt
from benchmarks.step_time import measure

WAYS = {
    "torch operators": {"operator_backend": "torch", "disable_cuda_graph": True},
    "native operators": {"disable_cuda_graph": True},
    "last layer whole": {},
    "whole head": {"screen_head": False},
    "recorded": {},
}


def opened(name: str, options: dict[str, Any]) -> fwk.LLM:
    """An engine of that way. A last layer is whole if its model does not narrow."""
    from fwk_models._common.decoder import Decoder

    Decoder.prunes_last_layer = name != "last layer whole"
    try:
        return fwk.LLM(prefix_cache="none", max_total_tokens=16384, **options)
    finally:
        Decoder.prunes_last_layer = True


def compare_prompts(engines: dict[str, fwk.LLM], tokens: int, rounds: int) -> None:
    """Print a prompt's milliseconds in the engine until its first token; the first round warms up."""
    times = defaultdict[str, list[float]](list)
    for turn in range(rounds + 1):
        for name, llm in engines.items():
            seconds = measure_prompt(llm, tokens, f"{name}-{tokens}-{turn}", time.perf_counter)[0]["whole"]
            if turn:
                times[name].append(1e3 * seconds)
    first = times[next(iter(engines))]
    for name, own in times.items():
        ratio = statistics.median(x / y for x, y in zip(own, first, strict=True))
        print(f"| {tokens} | {name} | {statistics.median(own):.1f} | {min(own):.1f} | {ratio:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--prompts", default="16,128,512")
    parser.add_argument("--ways", default=",".join(way for way in WAYS if way != "whole head"))
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="auto")
    arguments = parser.parse_args()
    common = {"dtype": arguments.dtype, "quantization": arguments.quantization}
    if arguments.model:
        common["model"] = arguments.model
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(opened(name, {**common, **options}))
            for name, options in WAYS.items()
            if name in arguments.ways.split(",")
        }
        for name, llm in engines.items():
            print(f"{name}: {llm.engine.info.chosen['step']}")
        print("\n| tokens | way | ms, median | least | share of the first way's |\n| --- | --- | --- | --- | --- |")
        for tokens in map(int, filter(None, arguments.prompts.split(","))):
            compare_prompts(engines, tokens, arguments.rounds)
        print("\n| batch | way | model ms, median | least | step ms, median | model: share of the first way's |")
        print("| --- | --- | --- | --- | --- | --- |")
        for batch in map(int, filter(None, arguments.batches.split(","))):
            model, step = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
            for _ in range(arguments.rounds):
                for name, llm in engines.items():
                    row = measure(llm, batch, arguments.steps, arguments.context, {"temperature": 0.0})
                    model[name].append(row["model"])
                    step[name].append(row["step"])
            first = model[next(iter(engines))]
            for name in engines:
                ratio = statistics.median(x / y for x, y in zip(model[name], first, strict=True))
                figures = (statistics.median(model[name]), min(model[name]), statistics.median(step[name]))
                cells = " | ".join(f"{value:.2f}" for value in (*figures, ratio))
                print(f"| {batch} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
