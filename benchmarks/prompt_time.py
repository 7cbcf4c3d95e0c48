"""Where the time of a prompt goes, operator by operator.

    python -m benchmarks.prompt_time [--tokens 128,1024,3500] [--repeat 5] [--clock cpu] [--quantization int8]

The engine runs in this process. Linear layers are told by their shape, other native operators by their arguments'
structure; "other" is all the rest of the step: torch's operators, allocations, Python, sampling, of which a recorded
step spares most (``benchmarks.recorded_step``). Medians of repeats in milliseconds, and the multiply-adds of linear
layers per second. ``--clock cpu`` counts this thread's processor time, for machines that others use too; it needs
``OMP_NUM_THREADS=1``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import fwk
from fwk import SamplingParams
from fwk.types import Request
from fwk_native.thread_pool import ThreadPool

Times = dict[str, float]


def label_of(args: Any) -> str:
    """What an operator is called in the table."""
    name = type(args).__name__.strip("_").removesuffix("Struct").lower()
    if name != "linearcall":
        return name
    from fwk_quant._linear_cpu.kernel import Header

    header = Header.from_address(args.matrix)
    return f"linear {header.in_features} to {header.out_features}"


class Watch:
    """Sums the seconds of operators by name while it is entered."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.now: Times = defaultdict(float)
        self.work: dict[str, int] = defaultdict(int)
        self._inner = ThreadPool.run

    def __enter__(self) -> None:
        def timed(threads: ThreadPool, op: int, args: Any, *, is_small: bool = False) -> None:
            started = self.clock()
            self._inner(threads, op, args, is_small=is_small)
            label = label_of(args)
            self.now[label] += self.clock() - started
            if label.startswith("linear "):
                inputs, outputs = label.removeprefix("linear ").split(" to ")
                self.work[label] += int(inputs) * int(outputs) * args.rows

        ThreadPool.run = timed  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        ThreadPool.run = self._inner  # type: ignore[method-assign]


def measure(llm: fwk.LLM, tokens: int, name: str, clock: Callable[[], float]) -> tuple[Times, dict[str, int]]:
    """Seconds of each operator, and of the whole, until the first token."""
    engine, watch = llm.engine, Watch(clock)
    vocab = engine.info.vocab_size
    prompt = [(i * 104729 + 17) % (vocab - 10) + 5 for i in range(tokens)]
    request = Request(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1, temperature=0.0))
    started = clock()
    with watch:
        engine.add(request)
        while engine.has_work:
            engine.step()
    whole = clock() - started
    watch.now["other"] = whole - sum(watch.now.values())
    return {"whole": whole, **watch.now}, watch.work


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", default="128,1024,3500")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    arguments = parser.parse_args()
    clock = time.thread_time if arguments.clock == "cpu" else time.perf_counter
    options = {"dtype": arguments.dtype, "quantization": arguments.quantization, "disable_cuda_graph": True}
    with fwk.LLM(prefix_cache="none", max_total_tokens=8192, **options) as llm:  # replayed, operators are one call
        for tokens in map(int, arguments.tokens.split(",")):
            rows: dict[str, list[float]] = defaultdict(list)
            work: dict[str, int] = {}
            for turn in range(arguments.repeat + 1):
                times, work = measure(llm, tokens, f"{tokens}-{turn}", clock)
                for name, seconds in times.items() if turn else ():
                    rows[name].append(seconds)
            print(f"\n{tokens} tokens\n\n| operator | ms | share | G multiply-adds/s |\n| --- | --- | --- | --- |")
            whole = statistics.median(rows["whole"])
            for name, values in sorted(rows.items(), key=lambda item: -statistics.median(item[1])):
                middle = statistics.median(values)
                rate = f"{work[name] / middle / 1e9:.0f}" if name in work else ""
                print(f"| {name} | {1e3 * middle:.1f} | {middle / whole:.0%} | {rate} |", flush=True)


if __name__ == "__main__":
    main()
