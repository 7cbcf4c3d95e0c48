"""What picking tokens costs: all processors and each sampler, in turns.

    python -m benchmarks.sampling_cost [--vocab 49152] [--batches 1,8,32] [--samplers torch,cpu] [--repeat 30]
                                        [--clock cpu]

Logits are random bfloat16 numbers spread as a small model's are. Minima in milliseconds. ``--clock cpu`` counts this
thread's processor time, for machines that others use too; it needs OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from fwk import SamplingParams
from fwk.interfaces.sampling import LogitsProcessorSpec, SamplerSpec, SamplingContext
from fwk.interfaces.step import StepRows
from fwk.plugins import build, discover, find
from fwk.types import NewSequence
from fwk.worker.runner.sequence_table import SequenceTable
from fwk.worker.sampling.pipeline import SamplingPipeline, num_finished
from fwk_native.thread_pool import ThreadPool

CONTEXT = 100
KINDS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "temperature, top-p": {"temperature": 0.8, "top_p": 0.95},
    "temperature, top-k, top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "temperature, min-p": {"temperature": 0.8, "min_p": 0.05},
    "hot: temperature 2, top-p": {"temperature": 2.0, "top_p": 0.95},
}


def pipeline(name: str, vocab: int, batch: int, kind: dict[str, float]) -> SamplingPipeline:
    """All installed processors and one sampler, with ``batch`` sequences."""
    plugins = discover()
    context = SamplingContext(vocab, batch, torch.device("cpu"), (), threads=ThreadPool())
    items = plugins.family("logits_processors")
    orders = {i.name: i.declaration.order for i in items if isinstance(i.declaration, LogitsProcessorSpec)}
    items = sorted(items, key=lambda i: orders[i.name])
    processors = [build(item, context) for item in items]
    item = find(plugins, "samplers", name)
    assert isinstance(item.declaration, SamplerSpec)
    table = SequenceTable(batch, 2 * CONTEXT, 16)
    count = num_finished([i.name for i in items], item.declaration.finishes)
    made = SamplingPipeline(processors, build(item, context), table, count)
    for slot in range(batch):
        params = SamplingParams(**kind)  # type: ignore[arg-type]
        new = NewSequence(slot, list(range(CONTEXT)), CONTEXT, 0, [], params, slot)
        table.add(new)
        made.add(new)
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--samplers", default="torch,cpu")
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    arguments = parser.parse_args()
    clock = time.thread_time if arguments.clock == "cpu" else time.perf_counter
    names = arguments.samplers.split(",")
    print(f"{torch.get_num_threads()} threads, {arguments.vocab} tokens; ms, minima\n")
    print("| rows | settings |" + "".join(f" {name} |" for name in names) + f" {names[0]} / {names[-1]} |")
    print("| --- | --- |" + " --- |" * (len(names) + 1))
    for batch in map(int, arguments.batches.split(",")):
        logits = (torch.randn(batch, arguments.vocab, generator=torch.Generator().manual_seed(0)) * 2.5).bfloat16()
        slots = np.arange(batch)
        rows = StepRows(slots, slots, np.full(batch, CONTEXT))
        for label, kind in KINDS.items():
            made = {name: pipeline(name, arguments.vocab, batch, kind) for name in names}
            best = dict.fromkeys(names, float("inf"))
            with torch.inference_mode():
                for _ in range(arguments.repeat):
                    for name, sampling in made.items():
                        started = clock()
                        sampling.sample(logits, rows)
                        best[name] = min(best[name], clock() - started)
            cells = "".join(f" {1e3 * best[name]:.3f} |" for name in names)
            print(f"| {batch} | {label} |{cells} {best[names[0]] / best[names[-1]]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
