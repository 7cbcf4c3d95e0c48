"""Steps of a device that is not there: what it is given to do, what the host does for that, and whether it ever idles.

    python -m benchmarks.step_time --device pretended [--batches 256] [--steps 60] [--forward-ms 5]
        [--sampling-backend triton]

The device of ``tests/helpers/pretend_cuda``. What it pretends to compute costs nothing here: seconds within it are
taken off the host's clock, and so is what it takes to get there beyond what torch takes to get to an operator of the
CPU. A forward pass takes ``--forward-ms`` on a clock of the device's own, from its launch on or from the end of the one
before. What a real device's driver takes for a launch is left out; the number of launches is told instead. The logits
are always the same noise, and picked is its largest or what a grammar allows: texts mean nothing. The host's clock is
the thread's CPU time.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.pretend_cuda import JOURNAL, device, pretended, tensors

import fwk
import fwk_attention.triton_paged.backend as triton_attention
import fwk_operators.triton_ops.backend as triton_operators
import fwk_sampling.triton_sampler.sampler as triton_sampler
from fwk import GrammarRequest, SamplingParams
from fwk.types import ForwardBatch, Request
from fwk.worker.graphs.step_graphs import DecodeGraphs
from fwk.worker.worker import LocalWorker
from fwk_sampling.triton_sampler import kernels

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "dtype": "bfloat16",
}
"""As many layers as Llama 3.1 8B has, each of them small."""
MAX_ROWS = 2048
"""Of logits in a step."""
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "seed": 1}
PENALISED: dict[str, Any] = {**SAMPLED, "repetition_penalty": 1.1, "frequency_penalty": 0.1}
GRAMMAR: dict[str, Any] = {**SAMPLED, "grammar": GrammarRequest("regex", "[a-z ]{4000}")}
ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": (GREEDY, {}),
    "sampled": (SAMPLED, {}),
    "sampled with penalties": (PENALISED, {}),
    "grammar": (GRAMMAR, {}),
    "n-gram drafts": (GREEDY, {"speculative_algorithm": "ngram"}),
}


class Clock:
    """The host's clock without what is only pretended, and the device's."""

    def __init__(self, forward_seconds: float) -> None:
        self._forward = forward_seconds
        self._pretended = 0.0  # seconds within the pretended device
        self._waited = 0.0  # for it, on its own clock
        self._depth = 0
        self.done = 0.0  # when the device has done all it was given
        self.idle = 0.0
        self.call_seconds = 0.0

    def now(self) -> float:
        return time.thread_time() - self._pretended + self._waited

    @contextmanager
    def pretending(self) -> Iterator[None]:
        started = time.thread_time()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._pretended += time.thread_time() - started + self.call_seconds

    def launch_forward(self) -> None:
        now = self.now()
        if self.done:
            self.idle += max(0.0, now - self.done)
        self.done = max(now, self.done) + self._forward

    def wait_until(self, moment: float) -> None:
        self._waited += max(0.0, moment - self.now())

    def calibrate(self) -> None:
        """Measure what calling the pretended device costs outside of it; called when the clock runs."""
        there, here = torch.zeros(4, device=tensors.DEVICE), torch.zeros(4)
        count, started = 2000, self.now()
        for _ in range(count):
            there.add_(1)
        outside = self.now() - started
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            started = time.thread_time()
            for _ in range(count):
                here.add_(1)
            self.call_seconds = max(0.0, (outside - (time.thread_time() - started)) / count)

    def timed(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.pretending():
                return real(*args, **kwargs)

        return call


class Picks:
    """What the sampler's kernels pick, without a look at the logits: it would push all else out of a core's cache."""

    largest: torch.Tensor  # [MAX_ROWS] int64, of logits that are the same in every step

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._allowed: list[tuple[torch.Tensor, torch.Tensor]] = []  # rows, and the first token a grammar allows

    def launch(self, function: Any, grid: tuple[int, int], *arguments: Any, **constants: Any) -> None:
        with self._clock.pretending():
            JOURNAL.launch(function.fn.__name__)
            if function is kernels.mask_rows:
                rows, masks = tensors.inner(arguments[2]), tensors.inner(arguments[3])
                nth = (masks != 0).int().argmax(1)
                word = masks.gather(1, nth[:, None]).squeeze(1).long()
                self._allowed.append((rows, nth * 32 + (word & -word).double().log2().long()))
            elif function is kernels.pick_rows:
                picked = tensors.inner(arguments[4])
                picked.copy_(self.largest[: len(picked)])
                for rows, tokens in self._allowed:
                    picked[rows] = tokens
                self._allowed.clear()


@contextmanager
def measured(forward_seconds: float, vocab_size: int, hidden_size: int) -> Iterator[Clock]:
    """Within, kernels of ours compute nothing, decode steps take a device's time, and both clocks run."""
    clock = Clock(forward_seconds)

    def launch(function: Any, grid: tuple[int, int], *arguments: Any, **constants: Any) -> None:
        JOURNAL.launch(function.fn.__name__)

    noise: list[torch.Tensor] = []
    picks = Picks(clock)

    def run(model: DecodeGraphs, batch: ForwardBatch) -> Any:
        with clock.pretending():
            rows = len(batch.logits_indices) - batch.padding
            if not noise:
                generator = torch.Generator().manual_seed(0)
                logits = torch.randn((MAX_ROWS, vocab_size), generator=generator)
                picks.largest = logits.argmax(1)
                noise.append(logits.to(tensors.DEVICE))
            made = noise[0][:rows]
            hidden = torch.zeros((len(batch.token_ids), hidden_size), dtype=torch.bfloat16, device=tensors.DEVICE)
            JOURNAL.launch("graph" if batch.is_static else "forward")
        clock.launch_forward()
        return hidden, (made if rows else None)

    class TimedEvent(device.PretendedEvent):
        def record(self) -> None:
            super().record()
            self._done = clock.done

        def wait(self) -> None:
            with clock.pretending():
                super().wait()
            clock.wait_until(getattr(self, "_done", 0.0))

    with pytest.MonkeyPatch.context() as patch:
        for module in (triton_attention, triton_operators):
            patch.setattr(module, "_launch", launch)
        patch.setattr(triton_sampler, "_launch", picks.launch)
        patch.setattr(DecodeGraphs, "run", run)
        patch.setattr(device, "PretendedEvent", TimedEvent)
        patch.setattr(tensors, "run", clock.timed(tensors.run))
        yield clock


def options_of(batch: int, context: int, steps: int, **more: Any) -> dict[str, Any]:
    return {
        "load_format": "dummy",
        "device": "pretended",
        "max_running_requests": batch,
        "max_total_tokens": batch * (context + steps + 200),
        "attention_backend": "triton",
        "operator_backend": "triton",
        "sampling_backend": "triton",
        "cuda_graph_bs": (batch,),
        "cuda_graph_max_bs": batch,
        **more,
    }


def launches(folder: Path) -> dict[str, int]:
    """Of the model of one decode step, eager and captured."""
    found: dict[str, int] = {}
    real = DecodeGraphs.run

    def launch(function: Any, grid: tuple[int, int], *arguments: Any, **constants: Any) -> None:
        JOURNAL.launch(function.fn.__name__)
        if tensors.NODES is not None:
            tensors.NODES.append(lambda: None)

    def counted(model: DecodeGraphs, batch: ForwardBatch) -> Any:
        before = JOURNAL.launches.total()
        made = real(model, batch)
        if batch.is_decode:
            found["captured" if batch.is_static else "eager"] = JOURNAL.launches.total() - before
        return made

    with pytest.MonkeyPatch.context() as patch:
        for module in (triton_attention, triton_operators):
            patch.setattr(module, "_launch", launch)
        patch.setattr(DecodeGraphs, "run", counted)
        for without in (False, True):
            more = {"sampling_backend": "torch"}  # whose tokens are right, though no kernel computes anything
            more |= {"cuda_graph_bs": (3,), "disable_cuda_graph_padding": True} if without else {}
            options = options_of(4, 16, 8, **more)
            with pretended() as plugins, fwk.LLM(str(folder), plugins=plugins, **options) as llm:
                prompts = [[5 + n, 6, 7] for n in range(4)]
                params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
                for i, prompt in enumerate(prompts):
                    llm.engine.add(Request(request_id=str(i), prompt_token_ids=prompt, sampling=params))
                for _ in range(3):
                    llm.engine.step()
    return found


def measure(
    folder: Path, name: str, batch: int, steps: int, context: int, forward_ms: float, **chosen: Any
) -> dict[str, float]:
    """Median milliseconds of host work and counts of a decode step, and the share of the device's time that is idle."""
    asked, more = ASKED[name]
    described = json.loads((folder / "config.json").read_text())
    vocab_size, hidden_size = described["vocab_size"], described["hidden_size"]
    rows: dict[str, list[float]] = {"launch": [], "collect": [], "step": [], "launches": [], "waits": []}
    with measured(forward_ms / 1e3, vocab_size, hidden_size) as clock, pretended() as plugins:
        options = options_of(batch, context, steps, **more, **chosen)
        with fwk.LLM(str(folder), plugins=plugins, **options) as llm, pytest.MonkeyPatch.context() as patch:
            clock.calibrate()
            engine = llm.engine
            spent: Counter[str] = Counter()
            for half in ("launch", "collect"):
                patch.setattr(LocalWorker, half, _timed(clock, spent, half, getattr(LocalWorker, half)))
            params = SamplingParams(max_tokens=steps + 150, ignore_eos=True, **asked)
            for i in range(batch):
                prompt = [(i * 7919 + j % 40 * 104729) % (vocab_size - 10) + 5 for j in range(context)]
                engine.add(Request(request_id=str(i), prompt_token_ids=prompt, sampling=params))
            left = {str(i) for i in range(batch)}
            while left:
                left -= {event.request_id for event in engine.step()}
            for _ in range(15):
                engine.step()
            began, idle = clock.now(), clock.idle
            for _ in range(steps):
                spent.clear()
                JOURNAL.clear()
                waited, started = clock._waited, clock.now()
                engine.step()
                rows["step"].append(clock.now() - started - (clock._waited - waited))
                for half in ("launch", "collect"):
                    rows[half].append(spent[half])
                rows["launches"].append(JOURNAL.launches.total() / 1e3)
                rows["waits"].append(JOURNAL.syncs.total() / 1e3)
            share = (clock.idle - idle) / (clock.now() - began)
    return {key: 1e3 * statistics.median(values) for key, values in rows.items()} | {"idle": share}


def _timed(clock: Clock, spent: Counter[str], name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(worker: LocalWorker, argument: Any) -> Any:
        waited, started = clock._waited, clock.now()
        try:
            return real(worker, argument)
        finally:
            spent[name] += clock.now() - started - (clock._waited - waited)  # type: ignore[assignment]

    return call


def report(batches: list[int], steps: int, context: int, forward_ms: float, **chosen: Any) -> None:
    """Print what was measured, line by line."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(LLAMA))
        counts = launches(folder)
        print(f"launches of a decode step's model: {counts['eager']} eager, {counts['captured']} captured", flush=True)
        (folder / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 2}))
        for batch in batches:
            for asked in ASKED:
                row = measure(folder, asked, batch, steps, context, forward_ms, **chosen)
                print(
                    f"batch {batch}, {asked}: host work of a launch {row['launch']:.2f} ms, of a collected step "
                    f"{row['collect']:.2f}, of all of a step {row['step']:.2f}; {row['launches']:.0f} launches, "
                    f"{row['waits']:.0f} waits; idle {100 * row['idle']:.1f} %",
                    flush=True,
                )
