"""All linear layers of SmolLM2-135M, head included, in each weight format, in turns with oneDNN.

    python -m benchmarks.cpu_linears [--formats float,long,int8,int4,Q4_1] [--rows 1,8,32,512] [--repeat 7]
        [--dtype bfloat16] [--clock cpu]

Alongside the times: how much of the memory bandwidth a pass reaches that a loop reads in the same turns, how many
multiply-adds a second, and the ratio to oneDNN on weights that it packed. With more than 64 rows the head is left out,
as in a prompt. ``long`` is bfloat16 in 16 bits, ``float`` in 12 where the kernel does that. Medians; a ratio is of the
same turn. ``--clock cpu`` counts this thread's processor time, for machines that others use too; it needs
``OMP_NUM_THREADS=1``.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import fwk_native as native
from fwk_native.thread_pool import ThreadPool, operator
from fwk_quant._linear_cpu.integers import IntegerKernel, Integers, Nested
from fwk_quant._linear_cpu.kernel import FloatKernel, LinearKernel, PackedMatrix

LAYERS = 30
SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
HEAD = (49152, 576)
PAUSE = 0.02
"""Seconds after each: oneDNN's threads go on looking for work for a while, on the core of whoever comes next."""
SOURCE = Path(__file__).with_name("read_memory.cpp")


class _Read(ctypes.Structure):
    _fields_ = [("memory", ctypes.c_void_p), ("chunks", ctypes.c_int64), ("sum", ctypes.c_void_p)]


def reader(threads: ThreadPool, num_bytes: int) -> Callable[[], None]:
    """Reads so many bytes."""
    op = operator(native.load(SOURCE), "read_memory")
    memory, total = torch.ones(num_bytes // 8, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    args = _Read(memory.data_ptr(), len(memory) // 4096, total.data_ptr())

    def read() -> None:
        assert (memory.data_ptr(), total.data_ptr()) == (args.memory, args.sum)  # and so both are kept
        threads.run(op, args)

    return read


def integers(name: str, rows: int, columns: int) -> Integers:
    """Random ones; their values do not matter."""
    bits = {"int8": 8, "int4": 4, "Q8_0": 8, "Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_K": 5, "Q6_K": 6}[name]
    group = {"int8": columns, "int4": 64, "Q6_K": 16}.get(name, 32)
    numbers = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8)
    groups = columns // group
    scales = torch.rand(rows, groups).half() / 2**bits
    if name == "Q4_1":
        return Integers(bits, numbers, group, scales, offsets=scales)
    if name in ("Q4_K", "Q5_K"):
        bytes_ = torch.randint(0, 64, (rows, groups), dtype=torch.int8)
        nested = Nested(torch.rand(rows, groups // (8 if groups % 8 == 0 else groups)).half(), bytes_)
        return Integers(bits, numbers, group, nested, offsets=nested)
    zero = torch.randint(0, 16, (rows, groups), dtype=torch.uint8) if name == "int4" else 2 ** (bits - 1)
    return Integers(bits, numbers, group, scales, zero)


def size_of(matrix: PackedMatrix) -> int:
    return sum(x.numel() * x.element_size() for x in (matrix.words, *matrix.scales))


Formats = dict[str, tuple[LinearKernel, list[PackedMatrix]]]


def pack_all(names: list[str], plain: list[Tensor], threads: ThreadPool) -> Formats:
    """Every matrix in every format."""
    found: Formats = {}
    for name in names:
        if name in ("float", "long"):
            floats = FloatKernel(threads, shortens=name == "float")
            found[name] = (floats, [floats.pack(weight) for weight in plain])
        else:
            kernel = IntegerKernel(threads)
            found[name] = (kernel, [kernel.pack(integers(name, *weight.shape)) for weight in plain])
    return found


def take_turns(
    runs: dict[str, Callable[[], object]], repeat: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of each, turn by turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeat):
        for name, run in runs.items():
            started = clock()
            run()
            times[name].append(clock() - started)
            time.sleep(PAUSE)
    return times


def own(kernel: LinearKernel, matrices: list[PackedMatrix], inputs: dict[int, Tensor]) -> None:
    for matrix in matrices:
        kernel.apply(matrix, inputs[matrix.size[1]], None)


def onednn(packed: list[Tensor], columns: list[int], inputs: dict[int, Tensor]) -> None:
    for weight, size in zip(packed, columns, strict=True):
        torch.ops.mkldnn._linear_pointwise(inputs[size], weight, None, "none", [], "")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--formats", default="float,int8,int4,Q4_1")
    parser.add_argument("--rows", default="1,8,32,512")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    arguments = parser.parse_args()
    clock = time.thread_time if arguments.clock == "cpu" else time.perf_counter
    dtype, threads = getattr(torch, arguments.dtype), ThreadPool()
    plain = [torch.randn(shape).to(dtype) for shape in [*SHAPES * LAYERS, HEAD]]
    columns = [weight.shape[1] for weight in plain]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 512) for weight in plain]
    formats = pack_all(arguments.formats.split(","), plain, threads)
    sizes = {name: sum(map(size_of, matrices)) for name, (_, matrices) in formats.items()}
    readers = {name: reader(threads, size) for name, size in sizes.items()}
    print(f"{threads.size} threads, {native.isa()}, {arguments.dtype}; median ms, least in brackets\n")
    print("| format | MB | rows | reading | kernel | share of the bandwidth | G multiply-adds/s | oneDNN / kernel |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for rows in map(int, arguments.rows.split(",")):
        count = len(plain) - (rows > 64)
        inputs = {size: torch.randn(rows, size).to(dtype) for size in set(columns)}
        runs: dict[str, Callable[[], object]] = {"onednn": partial(onednn, packed[:count], columns[:count], inputs)}
        for name, (kernel, matrices) in formats.items():
            runs[name] = partial(own, kernel, matrices[:count], inputs)
            runs[f"read {name}"] = readers[name]
        with torch.inference_mode():
            times = take_turns(runs, arguments.repeat, clock)
        work = rows * sum(weight.numel() for weight in plain[:count])
        for name, size in sizes.items():
            mine, read = statistics.median(times[name]), statistics.median(times[f"read {name}"])
            ratio = statistics.median(a / b for a, b in zip(times["onednn"], times[name], strict=True))
            share = f"{read / mine:.0%}" if rows <= 64 else "-"
            print(
                f"| {name} | {size / 1e6:.0f} | {rows} | {1e3 * read:.1f} ({1e3 * min(times[f'read {name}']):.1f}) "
                f"| {1e3 * mine:.1f} ({1e3 * min(times[name]):.1f}) | {share} | {work / mine / 1e9:.0f} "
                f"| {ratio:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
