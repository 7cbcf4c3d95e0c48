"""Where a decode step's time goes: the model, and the Python around it.

    python -m benchmarks.step_time [--batches 1,8,32] [--steps 100] [--attention-backend cpu] [--sampling-backend cpu]
        [--quantization gguf] [--cpu-threads 1] [--profile]
    python -m benchmarks.step_time --device pretended   # benchmarks.device_steps

The engine runs in this process. "model" is planning attention, the forward pass and the logits; everything else of a
step is "around": scheduling, building the batch, sampling, taking the result in, and encoding and decoding the messages
between the processes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from typing import Any

import msgspec

import fwk
from fwk import SamplingParams
from fwk.types import FromEngine, Request, StepOutputs


class Stopwatch:
    """Wraps methods of an engine's parts and sums their seconds by name, step by step."""

    def __init__(self) -> None:
        self.now: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, name: str, label: str) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.now[label] += time.perf_counter() - started

        setattr(owner, name, timed)


def measure(llm: fwk.LLM, batch: int, steps: int, context: int, sampling: dict[str, Any]) -> dict[str, float]:
    """Median milliseconds of each part of a decode step."""
    engine = llm.engine
    runner = engine.executor._worker._runner  # type: ignore[attr-defined]
    params = SamplingParams(max_tokens=steps + 100, ignore_eos=True, **sampling)
    vocab = engine.info.vocab_size
    for i in range(batch):
        prompt = [(i * 7919 + j * 104729) % (vocab - 10) + 5 for j in range(context)]
        engine.add(Request(request_id=f"b{batch}-{i}", prompt_token_ids=prompt, sampling=params))
    prompts = {f"b{batch}-{i}" for i in range(batch)}
    while prompts:  # those not computed to their end yet
        prompts -= {event.request_id for event in engine.step()}
    for _ in range(10):
        engine.step()
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(FromEngine)
    watch = Stopwatch()
    watch.wrap(engine.scheduler, "schedule", "schedule")
    watch.wrap(engine.scheduler, "update", "update")
    watch.wrap(runner._members, "begin", "worker: take plan in")
    watch.wrap(runner._inputs, "prepare", "worker: build inputs")
    watch.wrap(runner, "_plan_attention", "worker: plan attention")
    watch.wrap(runner._sampler, "sample", "worker: sample")
    rows: dict[str, list[float]] = defaultdict(list)
    seen: list[Any] = []
    collect = engine.executor.collect
    engine.executor.collect = lambda pending: seen.append(pending) or collect(pending)  # type: ignore[method-assign]
    for _ in range(steps):
        watch.now.clear()
        seen.clear()
        started = time.perf_counter()
        events = engine.step()
        stepped = time.perf_counter()
        message = encoder.encode(StepOutputs(events, engine.stats()))
        decoder.decode(message)
        ended = time.perf_counter()
        model = seen[0].model_seconds
        rows["step"].append(ended - started)
        rows["model"].append(model)
        rows["around"].append(ended - started - model)
        rows["messages"].append(ended - stepped)
        for name, seconds in watch.now.items():
            rows[name].append(seconds)
    engine.executor.collect = collect  # type: ignore[method-assign]
    for i in range(batch):
        engine.abort(f"b{batch}-{i}")
    return {name: 1e3 * statistics.median(values) for name, values in rows.items()}


def profile(llm: fwk.LLM, batch: int, context: int) -> str:
    """torch's profile of ten decode steps, by operator."""
    import torch

    engine = llm.engine
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)
    for i in range(batch):
        prompt = [(i * 7919 + j * 104729) % 40_000 + 5 for j in range(context)]
        engine.add(Request(request_id=f"p{batch}-{i}", prompt_token_ids=prompt, sampling=params))
    for _ in range(10):
        engine.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        for _ in range(10):
            engine.step()
    for i in range(batch):
        engine.abort(f"p{batch}-{i}")
    total = sum(event.self_cpu_time_total for event in recorded.key_averages())
    lines = ["| operator | share | calls a step | us a call |", "| --- | --- | --- | --- |"]
    for event in sorted(recorded.key_averages(), key=lambda e: -e.self_cpu_time_total)[:12]:
        share = event.self_cpu_time_total / total
        each = event.self_cpu_time_total / event.count
        lines.append(f"| {event.key} | {share:.0%} | {event.count / 10:.0f} | {each:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--cpu-threads", type=int)
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--sampling-backend", default="auto")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--device", default="cpu", choices=("cpu", "pretended"))
    parser.add_argument("--forward-ms", type=float, default=5.0, help="of the pretended device")
    arguments = parser.parse_args()
    if arguments.device == "pretended":
        from benchmarks import device_steps

        batches = [int(batch) for batch in arguments.batches.split(",")]
        measured = arguments.steps, arguments.context, arguments.forward_ms
        return device_steps.report(batches, *measured, sampling_backend=arguments.sampling_backend)
    options = {
        "dtype": arguments.dtype,
        "quantization": arguments.quantization,
        "cpu_threads": arguments.cpu_threads,
        "attention_backend": arguments.attention_backend,
        "sampling_backend": arguments.sampling_backend,
    }
    with fwk.LLM(prefix_cache="none", max_total_tokens=32768, **options) as llm:
        for label, sampling in (
            ("greedy", {"temperature": 0.0}),
            ("temperature, top-k, top-p", {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "seed": 1}),
        ):
            for batch in map(int, arguments.batches.split(",")):
                row = measure(llm, batch, arguments.steps, arguments.context, sampling)
                text = ", ".join(f"{name} {ms:.2f}" for name, ms in row.items())
                print(f"batch {batch}, {label}: {text} (median ms)", flush=True)
        if arguments.profile:
            for batch in map(int, arguments.batches.split(",")):
                print(f"\nbatch {batch}\n\n{profile(llm, batch, arguments.context)}", flush=True)


if __name__ == "__main__":
    main()
