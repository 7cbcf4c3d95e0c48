"""Where the time of a recorded decode step goes, operator by operator, on one thread and on several.

    python -m benchmarks.step_operators [--model gemma3-270m] [--quantization gguf] [--batches 1,32] [--context 128]
        [--threads 1,2] [--repeat 30]

The engine runs in this process and records a step of each size; the tape is then replayed with a clock between
operators, in turns with each number of threads. Linear layers are told by their shape, other operators by their
arguments' structure. Medians of repeats, in microseconds; a step's operators of one name are added up first.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
from collections import defaultdict
from pathlib import Path

import fwk
import fwk_native as native
from benchmarks.prompt_time import label_of
from fwk import SamplingParams
from fwk.types import Request
from fwk_native.thread_pool import Tape

SOURCE = Path(__file__).with_name("step_operators.cpp")


def recorded(llm: fwk.LLM, batch: int, context: int) -> Tape:
    """The tape of a decode step, its inputs those of its latest step."""
    engine = llm.engine
    params = SamplingParams(max_tokens=50, ignore_eos=True, temperature=0.0)
    vocab = engine.info.vocab_size
    for i in range(batch):
        prompt = [(i * 7919 + j * 104729) % (vocab - 10) + 5 for j in range(context)]
        engine.add(Request(request_id=f"b{batch}-{i}", prompt_token_ids=prompt, sampling=params))
    while engine.stats().num_waiting:
        engine.step()
    for _ in range(5):
        engine.step()
    for i in range(batch):
        engine.abort(f"b{batch}-{i}")
    model = engine.executor._worker._runner.model  # type: ignore[attr-defined]
    if model.graph is None:
        raise SystemExit(f"steps are not recorded: {model.refusal}")
    return model.graph.tape


def timed(tape: Tape, threads: list[int], repeat: int) -> dict[str, list[float]]:
    """Median microseconds of each kind of operator, for each number of threads."""
    library = native.load(SOURCE, "plain")
    times = (ctypes.c_int64 * len(tape))()
    found: dict[str, list[list[float]]] = defaultdict(lambda: [[] for _ in threads])
    for turn in range(repeat + 2):
        for place, size in enumerate(threads):
            library.run_timed(tape.array(), ctypes.c_int64(len(tape)), size, times)
            sums: dict[str, float] = defaultdict(float)
            for (_, args), nanoseconds in zip(tape.calls, times, strict=True):
                sums[label_of(args)] += nanoseconds / 1e3
            sums["whole"] = sum(sums.values())
            for name, value in sums.items() if turn > 1 else ():
                found[name][place].append(value)
    return {name: [statistics.median(values) for values in by_size] for name, by_size in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--batches", default="1")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="auto")
    arguments = parser.parse_args()
    threads = [int(size) for size in arguments.threads.split(",")]
    options = {"dtype": arguments.dtype, "quantization": arguments.quantization}
    if arguments.model:
        options["model"] = arguments.model
    with fwk.LLM(prefix_cache="none", max_total_tokens=32768, **options) as llm:
        for batch in map(int, arguments.batches.split(",")):
            tape = recorded(llm, batch, arguments.context)
            calls: dict[str, int] = defaultdict(int)
            for _, args in tape.calls:
                calls[label_of(args)] += 1
            found = timed(tape, threads, arguments.repeat)
            heads = " | ".join(f"us on {size}" for size in threads)
            print(f"\nbatch {batch}\n\n| operator | calls | {heads} |\n| --- | ---{' | ---' * len(threads)} |")
            for name, values in sorted(found.items(), key=lambda item: -item[1][0]):
                cells = " | ".join(f"{value:.0f}" for value in values)
                print(f"| {name} | {calls.get(name, len(tape))} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
