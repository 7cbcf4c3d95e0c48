"""Native kernels alongside torch's own path, on as few cores and instructions as a smaller machine has.

    python -m benchmarks.shapes [--cores 1] [--isa avx2] [--dtype bfloat16] [--quantization int8] [--rounds 3]

Two engines in processes of their own take turns: one as fwk is installed, one that finds no C++ compiler, so that torch
computes everything. ``--isa`` holds for both: kernels are built for it, and torch and oneDNN are told to use no more.
Milliseconds; a ratio is torch's time to ours in the same round, so above 1 where ours is faster.

    python -m benchmarks.shapes --bounds Q4_K,Q6_K,Q8_0 [--shape 1b] [--isa avx2] [--cores 1] [--clock cpu]

The matrices of a layer in packed formats, by rows: the share of the time that a loop needs which only reads them.
``--clock cpu`` counts this thread's processor time, for machines that others use too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

from benchmarks.peers.engines import TORCH_ISA, isa_environment
from benchmarks.peers.page import machine

PROMPTS = (16, 128, 1024)
BATCHES = (1, 2, 4, 8, 32)
CONTEXT = 128


def work(dtype: str, quantization: str) -> None:
    """An engine that measures once for each line it reads."""
    import fwk
    from benchmarks.step_time import measure
    from fwk import SamplingParams
    from fwk.types import Request

    options: dict[str, Any] = {"dtype": dtype, "quantization": quantization}
    with fwk.LLM(prefix_cache="none", max_total_tokens=16384, max_running_requests=max(BATCHES), **options) as llm:
        engine = llm.engine

        def prompt(size: int) -> float:
            ids = [j * 104729 % 40_000 + 5 for j in range(size)]
            engine.add(Request(request_id="p", prompt_token_ids=ids, sampling=SamplingParams(max_tokens=1)))
            started = time.perf_counter()
            while engine.has_work:
                engine.step()
            return 1e3 * (time.perf_counter() - started)

        prompt(16)
        print("ready", flush=True)
        for _ in sys.stdin:
            found = {f"prompt of {size}": prompt(size) for size in PROMPTS}
            for batch in BATCHES:
                found[f"decode, batch {batch}"] = measure(llm, batch, 10, CONTEXT, {"temperature": 0.0})["step"]
            print(json.dumps(found), flush=True)


def bounds(formats: list[str], shape: str, isa: str | None, rounds: int, *, counts_cpu: bool) -> None:
    """Print what share of the read bound products with each format reach."""
    import torch

    import fwk_native as native
    from benchmarks.cpu_linears import integers, reader, size_of
    from benchmarks.model_shapes import SHAPES, tensors
    from fwk_native.thread_pool import ThreadPool
    from fwk_quant._linear_cpu.integers import IntegerKernel

    clock = time.thread_time if counts_cpu else time.perf_counter
    config, threads = SHAPES[shape], ThreadPool(len(os.sched_getaffinity(0)))
    sizes = [size for name, size in tensors(config).items() if ".layers.0." in name and len(size) == 2] * 2
    kernel = IntegerKernel(threads, isa)
    print(f"{machine()}; {threads.size} threads, {isa or native.isa()}, two layers of {shape}\n")
    print("| format | rows | ms, median | read bound, ms | share, median (least to most) |")
    print("| --- | --- | --- | --- | --- |")
    for name in formats:
        packed = [kernel.pack(integers(name, *size)) for size in sizes]
        read = reader(threads, sum(map(size_of, packed)))
        for rows in BATCHES[:-1]:
            inputs = {size[1]: torch.randn(rows, size[1]).bfloat16() for size in sizes}

            def run(x: dict[int, torch.Tensor] = inputs, packed: list[Any] = packed) -> None:
                for matrix in packed:
                    kernel.apply(matrix, x[matrix.size[1]], None)

            times: list[tuple[float, float]] = []
            for _ in range(rounds + 1):
                starts = [clock()]
                for work in (run, read):
                    work()
                    starts.append(clock())
                times.append((starts[1] - starts[0], starts[2] - starts[1]))
            ours, bound = (1e3 * statistics.median(part) for part in zip(*times[1:], strict=True))
            shares = [b / a for a, b in times[1:]]
            spread = f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"
            print(f"| {name} | {rows} | {ours:.2f} | {bound:.2f} | {spread} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--isa", choices=list(TORCH_ISA), help="default: all the machine has")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bounds", help="packed formats, with commas between: their share of the read bound")
    parser.add_argument("--shape", default="1b", help="whose matrices --bounds takes")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="of --bounds; cpu needs --cores 1")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments.dtype, arguments.quantization)
    cores = sorted(os.sched_getaffinity(0))[-arguments.cores :]
    os.sched_setaffinity(0, cores)
    if arguments.bounds:
        counts_cpu, formats = arguments.clock == "cpu", arguments.bounds.split(",")
        return bounds(formats, arguments.shape, arguments.isa, arguments.rounds, counts_cpu=counts_cpu)
    environment = os.environ | {"OMP_NUM_THREADS": str(len(cores))} | isa_environment(arguments.isa)
    ways = {"native": {}, "torch": {"CXX": "no-compiler"}}
    command = [sys.executable, "-m", "benchmarks.shapes", "--worker", "--dtype", arguments.dtype]
    command += ["--quantization", arguments.quantization]
    rounds: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with ExitStack() as stack:
        workers: dict[str, subprocess.Popen[str]] = {}
        for way, more in ways.items():
            pipe = subprocess.PIPE
            worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment | more)
            workers[way] = stack.enter_context(worker)
            _line(worker)
        for _ in range(arguments.rounds):
            for way, worker in workers.items():
                assert worker.stdin is not None
                worker.stdin.write("\n")
                worker.stdin.flush()
                rounds[way].append(json.loads(_line(worker)))
    isa = arguments.isa or "all instructions"
    print(f"{machine()}; {len(cores)} of them used, {isa}, {arguments.dtype}, weights {arguments.quantization}\n")
    print("| | native, median ms | torch, median ms | torch / native, median (least to most) |")
    print("| --- | --- | --- | --- |")
    for name in rounds["native"][0]:
        ours, theirs = ([found[name] for found in rounds[way]] for way in ways)
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {name} | {statistics.median(ours):.1f} | {statistics.median(theirs):.1f} | {spread} |")


def _line(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise SystemExit("an engine ended: see above")
    return line


if __name__ == "__main__":
    main()
