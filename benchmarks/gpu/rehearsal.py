"""The same checks on the pretended device, of models that take it a second; kernels take a pretended time.

FlashInfer is its stand-in. Triton's kernels run in its interpreter, where that is asked for (``TRITON_INTERPRET=1``).
``REHEARSE`` in the environment makes a check misbehave: ``NAME=die``, ``NAME=hang`` or ``NAME=cuda``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tests.helpers.interpreted import convert_arrays_of_one
from tests.helpers.pretend_cuda import JOURNAL, flashinfer_stand_in, pretended, triton_kernels
from tests.helpers.pretend_cuda.journal import Journal

from benchmarks.gpu import checks
from benchmarks.gpu.cases import MODELS, Check, Work
from benchmarks.gpu.checks import Bench, Numbers, Skipped

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 1024,
}
SMALL_MODELS = {name: {**config, **SMALL} for name, config in MODELS.items()}
SMALL_WORKS = {"short": Work(2, 16, 8), "chunks": Work(2, 64, 4)}
KERNEL_SECONDS = 20e-6
"""That a kernel takes on the device, with its launch."""
MISBEHAVE = "REHEARSE"


def small(check: Check) -> Check:
    """The same, of a model that takes the pretended device a second."""
    options, settings = dict(check.options), dict(check.settings)
    if options.get("attention_backend") == "flashinfer":
        options["attention_backend"] = "flashinfer-stand-in"
    if "chunked_prefill_size" in options:
        options["chunked_prefill_size"] = 8
    if "cuda_graph_bs" in options:
        options |= {"cuda_graph_bs": (4,)}
    if "max_total_tokens" in options:
        options |= {"max_total_tokens": 2048}
    if "max_running_requests" in options:
        options |= {"max_running_requests": 4}
    if check.function == "serve" and "at_once" in settings:
        settings["at_once"] = (2, 3)
    for name, most in (("num_seqs", 3), ("num_prompt", 32), ("num_tokens", 6)):
        if name in settings:
            settings[name] = min(settings[name], most)
    return replace(check, options=options, settings=settings)


def _pretended(check: Check) -> Numbers:
    """What a check does before it is run: nothing, or what was asked for."""
    name, _, how = os.environ.get(MISBEHAVE, "").rpartition("=")
    if name and name in check.name:
        if how == "die":
            os._exit(9)
        if how == "hang":
            _hang()
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return {}


def _hang() -> None:
    """Where no alarm of Python's is heard."""
    import signal

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(3600)


class _Clock:
    """The device's: what is launched is done one after another."""

    def __init__(self) -> None:
        self.done = 0.0

    def launched(self) -> None:
        self.done = max(self.done, time.monotonic()) + KERNEL_SECONDS

    def wait(self) -> None:
        time.sleep(max(0.0, self.done - time.monotonic()))


@contextmanager
def rehearsed(given: list[Check], out: Path, references: Path) -> Iterator[tuple[list[Check], Bench]]:
    """The checks and what runs them; what only a device can do is skipped."""
    clock, launch, wait = _Clock(), Journal.launch, Journal.wait

    def launched(self: Journal, name: str) -> None:
        clock.launched()
        launch(self, name)

    def waited(self: Journal, mark: int | None = None) -> None:
        wait(self, mark)
        clock.wait()

    uses_triton = any(_needs_triton(check) for check in given)
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if uses_triton and is_interpreted:
        convert_arrays_of_one()
    with ExitStack() as stack:
        stack.callback(setattr, Journal, "launch", launch)
        stack.callback(setattr, Journal, "wait", wait)
        Journal.launch, Journal.wait = launched, waited  # type: ignore[method-assign]
        stack.enter_context(triton_kernels() if uses_triton and is_interpreted else flashinfer_stand_in())
        plugins = stack.enter_context(pretended())
        bench = Bench("pretended", torch.device("cpu"), out, references, plugins)
        bench.models, bench.works = SMALL_MODELS, SMALL_WORKS
        for name, function in list(checks.FUNCTIONS.items()):
            stack.callback(checks.FUNCTIONS.__setitem__, name, function)
            checks.FUNCTIONS[name] = _rehearsed(function, is_interpreted)
        yield [small(check) for check in given], bench
    assert JOURNAL.faults == [], JOURNAL.faults


def _needs_triton(check: Check) -> bool:
    return "triton" in check.options.values()


def _rehearsed(function: Any, is_interpreted: bool) -> Any:
    def run(bench: Bench, check: Check) -> Numbers:
        _pretended(check)
        if _needs_triton(check) and not is_interpreted:
            raise Skipped("needs TRITON_INTERPRET=1")
        if function is checks.serve:  # a process of its own, which knows of no pretended device
            on_cpu = {name: value for name, value in check.options.items() if name != "attention_backend"}
            bench.name, name = "cpu", bench.name
            try:
                return function(bench, replace(check, options=on_cpu))
            finally:
                bench.close()
                bench.name = name
        return function(bench, check)

    return run
