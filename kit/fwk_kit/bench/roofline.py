"""The machine's bounds, and how far each phase of a model is from its own (Williams, Waterman, Patterson 2009).

A decode step must read every weight once and the sequences' K/V, of routed experts those that its tokens choose; a
prefill must do its multiply-adds. What the machine can do of either is measured with torch, in this process, with all
threads. Native kernels on 8-bit numbers can compute faster than torch in bfloat16: more than 100 % of that bound.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from fwk.types import Request, SamplingParams
from fwk_layers.embedding import LMHead, VocabEmbedding
from fwk_layers.linear import ColumnParallelLinear, RowParallelLinear
from fwk_layers.moe import MoE

if TYPE_CHECKING:
    from fwk_offline.llm import LLM

READ_BYTES = 2**30
MATRIX = 2048


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes a second that can be read, and multiply-adds (counted as two) a second by rows of the product."""

    bandwidth: float
    rates: dict[int, float]

    @property
    def rate(self) -> float:
        """The best that was measured: products of few rows are slower because they read, which is counted apart."""
        return max(self.rates.values())


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase: what it must read and compute, and how long it took. Seconds."""

    name: str
    read: int
    operations: int
    rows: int
    seconds: float

    def bound(self, machine: Machine) -> float:
        """The least seconds it can take on this machine."""
        return max(self.read / machine.bandwidth, self.operations / machine.rate)


def measure_machine(dtype: torch.dtype = torch.bfloat16) -> Machine:
    """Read bandwidth over an array larger than caches, and the rate of products in ``dtype``; the best of several."""
    array = torch.ones(READ_BYTES // 4)
    bandwidth = READ_BYTES / _best(array.sum, 5)
    del array
    weight = torch.randn(MATRIX, MATRIX).to(dtype)
    rates: dict[int, float] = {}
    for rows in (1, 8, 32, 128, 512):
        x = torch.randn(rows, MATRIX).to(dtype)
        rates[rows] = 2 * rows * MATRIX**2 / _best(lambda x=x: F.linear(x, weight), 20)
    return Machine(bandwidth, rates)


def measure_phases(llm: LLM, context: int, steps: int, batches: tuple[int, ...], prompt: int) -> list[Phase]:
    """Time decode steps at each batch size with ``context`` tokens a sequence, and the prefill of one prompt."""
    head, bytes_read = _lm_head(llm)
    cell = kv_bytes(llm)
    phases: list[Phase] = []
    for batch in batches:
        weights, macs = model_size(llm, batch)
        seconds = _decode(llm, batch, context, steps)
        read = weights + batch * (context + steps // 2) * cell
        greedy = bytes_read(batch)
        if greedy is not None:
            read += greedy - head
        phases.append(Phase(f"decode, batch {batch}", read, 2 * batch * macs, batch, seconds))
    weights, macs = model_size(llm, prompt)
    phases.append(Phase(f"prefill, {prompt} tokens", weights, 2 * prompt * macs, prompt, _prefill(llm, prompt)))
    return phases


def model_size(llm: LLM, rows: int = 1) -> tuple[int, int]:
    """Bytes of the weights a step of so many tokens reads, and its multiply-adds for one token (the LM head's, too).

    Of routed experts those that the tokens choose, if each chooses as if by lot.
    """
    model = llm.engine.executor._worker._runner.model.model  # type: ignore[attr-defined]
    hidden, vocab = _hidden(llm), llm.engine.info.vocab_size
    nbytes, macs, seen = 0.0, 0.0, set[int]()
    for layer, active in _layers(model, set()):
        read = (layer.weights, getattr(layer, "bias", None))  # a kernel's other memory is not
        for tensor in _tensors(read, set()):
            place = id(tensor) if tensor.is_mkldnn else tensor.data_ptr()  # a library's own layout has no address
            if place not in seen:
                seen.add(place)
                nbytes += tensor.numel() * tensor.element_size() * (1 - (1 - active) ** rows)
        macs += active * (hidden * vocab if isinstance(layer, LMHead) else layer.in_features * sum(layer.out_features))
    return round(nbytes), round(macs)


def _lm_head(llm: LLM) -> tuple[int, Callable[[int], int | None]]:
    """Bytes of the LM head, and what a greedy step of so many rows reads of it; None: all.

    A quantisation method says so by ``bytes_read`` of what its ``lm_head`` returns.
    """
    model = llm.engine.executor._worker._runner.model.model  # type: ignore[attr-defined]
    head = next((layer for layer, _ in _layers(model, set()) if isinstance(layer, LMHead)), None)
    if head is None:
        return 0, lambda _: None
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(head.weights, set()))
    return nbytes, getattr(head.head_weights, "bytes_read", lambda _: None)


def kv_bytes(llm: LLM) -> int:
    """Bytes of K and V of one token, over all layers."""
    worker = llm.engine.executor._worker  # type: ignore[attr-defined]
    size = llm.engine.info.block_size * llm.engine.info.num_blocks
    return sum(layer.kv_cache.nbytes for layer in worker._builder._models.layers if layer.kv_cache is not None) // size


def table(machine: Machine, phases: list[Phase]) -> str:
    """Markdown."""
    rates = ", ".join(f"{rows}: {rate / 1e12:.3f}" for rows, rate in machine.rates.items())
    lines = [
        f"reads {machine.bandwidth / 1e9:.1f} GB/s; matrix products by rows, TFLOP/s: {rates}",
        "",
        "| phase | must read MB | must compute GFLOP | bound ms | took ms | share of the bound |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for phase in phases:
        bound = phase.bound(machine)
        lines.append(
            f"| {phase.name} | {phase.read / 1e6:.0f} | {phase.operations / 1e9:.1f} | {1e3 * bound:.2f} | "
            f"{1e3 * phase.seconds:.2f} | {100 * bound / phase.seconds:.0f} % |"
        )
    return "\n".join(lines)


def _decode(llm: LLM, batch: int, context: int, steps: int) -> float:
    """Median seconds of a decode step."""
    for index in range(batch):
        _add(llm, f"decode-{batch}-{index}", index, context, steps + 8)
    while llm.engine.stats().num_waiting or llm.engine.stats().num_running < batch:
        llm.engine.step()
    times: list[float] = []
    for _ in range(steps):
        started = time.perf_counter()
        llm.engine.step()
        times.append(time.perf_counter() - started)
    while llm.engine.stats().num_running:
        llm.engine.step()
    return statistics.median(times)


def _prefill(llm: LLM, prompt: int) -> float:
    """Best seconds of three to the first token of prompts that share nothing."""
    best = float("inf")
    for repeat in range(3):
        _add(llm, f"prefill-{repeat}", 1000 + repeat, prompt, 1)
        started = time.perf_counter()
        while not llm.engine.step():
            pass
        best = min(best, time.perf_counter() - started)
    return best


def _add(llm: LLM, request_id: str, salt: int, length: int, output: int) -> None:
    vocab = llm.engine.info.vocab_size
    ids = [(salt * 7919 + i * 104729) % (vocab - 10) + 5 for i in range(length)]
    params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
    llm.engine.add(Request(request_id=request_id, prompt_token_ids=ids, sampling=params))


def _best(call: Callable[[], object], times: int) -> float:
    call()
    best = float("inf")
    for _ in range(times):
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best


def _hidden(llm: LLM) -> int:
    return llm.engine.executor._worker._builder._setup.opened.config.hidden_size  # type: ignore[attr-defined]


def _layers(root: Any, seen: set[int], active: float = 1.0) -> Iterator[tuple[Any, float]]:
    """Linear layers and the LM head reachable from a model, each with the share of tokens that pass through it."""
    if id(root) in seen:
        return
    seen.add(id(root))
    if isinstance(root, (ColumnParallelLinear, RowParallelLinear, LMHead)):
        yield root, active
        return
    if isinstance(root, MoE):
        yield from _layers(root.runner, seen, root.routing.top_k / root.routing.num_experts)
    for part in _parts(root):
        yield from _layers(part, seen, active)


def _tensors(root: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(root, torch.Tensor):
        yield root
    elif id(root) not in seen:
        seen.add(id(root))
        for part in _parts(root):
            yield from _tensors(part, seen)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
    elif type(value).__module__.startswith("fwk") and not isinstance(value, VocabEmbedding):
        yield from getattr(value, "__dict__", {}).values()
        for name in getattr(type(value), "__slots__", ()):
            yield getattr(value, name, None)
