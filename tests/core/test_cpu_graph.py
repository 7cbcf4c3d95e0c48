"""Recorded steps: one tape for steps of all sizes, what cannot be on it, and whose memory it uses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

import fwk_native as native
from fwk.interfaces.graphs import Graph, GraphCapture, NotCapturable, StepOutput, StepSize
from fwk.interfaces.model import Model
from fwk.interfaces.operators import OperatorContext, Operators
from fwk.plugins import discover, find, load_object
from fwk.types import ForwardBatch
from fwk.worker.graphs.step_graphs import CapturedStepModel
from fwk_native.thread_pool import ThreadPool
from fwk_operators.cpu.graph import TapeCapture

pytestmark = pytest.mark.skipif(native.refusal() is not None, reason="no C++ compiler")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


MOST = StepSize(40, 40, 24, 4)
TABLE, WEIGHT, HEADS = random(50, 128), random(64, seed=1), random(4, 16, seed=2)
COS, SIN = random(40, 1, 16, seed=3), random(40, 1, 16, seed=4)
IDS, WANTED, AT = (torch.zeros(40, dtype=torch.int64) for _ in range(3))
"""Where inputs lie: token ids, and the tokens whose hidden states and whose logits are wanted."""


@pytest.fixture
def threads() -> ThreadPool:
    return ThreadPool(2)


@pytest.fixture
def operators(threads: ThreadPool) -> Operators:
    cls = load_object(find(discover(), "operators", "cpu"))
    return cls(OperatorContext(torch.device("cpu"), torch.float32, threads=threads))


def compute(operators: Operators, size: StepSize) -> tuple[Tensor, Tensor]:
    """[num_hidden, 64] and [num_logits, 64], by native operators, views and memory alone."""
    n = size.num_tokens
    residual = operators.gate(operators.rows(TABLE, IDS[:n]), "silu")
    x = operators.rms_norm(residual, WEIGHT, 1e-5)
    for _ in range(6):
        heads = operators.rms_norm(x.view(n, 4, 16), HEADS, 1e-5)
        operators.rotate(heads[:, :3], COS[:n], SIN[:n])
        x = operators.add_rms_norm(heads.reshape(n, -1), residual, WEIGHT, 1e-5)
    hidden = operators.rows(residual, WANTED[: size.num_hidden])
    return hidden, operators.rms_norm(operators.rows(x, AT[: size.num_logits]), WEIGHT, 1e-5)


@torch.inference_mode()
def test_a_tape_serves_steps_of_all_sizes_with_the_inputs_of_their_time(
    threads: ThreadPool, operators: Operators
) -> None:
    graph = TapeCapture(threads).capture(lambda size: compute(operators, size), MOST)
    assert threads.tape is None
    rng = np.random.default_rng(0)
    sizes = ((3, 3, 1), (1, 1, 1), (1, 1, 1), (40, 40, 24), (8, 8, 8), (17, 1, 0), (24, 24, 24), (40, 3, 2), (2, 2, 2))
    for tokens, num_hidden, logits in sizes:
        IDS[:tokens] = torch.from_numpy(rng.integers(0, 50, tokens))
        AT[:logits] = torch.from_numpy(rng.integers(0, tokens, logits))
        WANTED[:num_hidden] = torch.from_numpy(rng.integers(0, tokens, num_hidden))
        hidden, found = graph.replay(StepSize(tokens, num_hidden, logits, 1))
        wanted = compute(operators, StepSize(tokens, num_hidden, logits, 1))
        assert torch.equal(hidden, wanted[0])
        if logits:
            assert torch.equal(cast(Tensor, found), wanted[1])
        else:
            assert found is None


@torch.inference_mode()
def test_the_same_tensors_come_back_while_the_size_is_the_same(threads: ThreadPool, operators: Operators) -> None:
    graph = TapeCapture(threads).capture(lambda size: compute(operators, size), MOST)
    first, again, other = (graph.replay(StepSize(tokens, tokens, 2, 1)) for tokens in (3, 3, 4))
    assert first[1] is again[1]
    assert first[1] is not other[1]


@torch.inference_mode()
def test_nothing_is_computed_while_a_step_is_recorded(threads: ThreadPool, operators: Operators) -> None:
    x = torch.zeros(4, 8)

    def step(size: StepSize) -> StepOutput:
        operators.scale(x, 2.0)
        return compute(operators, size)

    x += 1
    graph = TapeCapture(threads).capture(step, MOST)
    assert torch.equal(x, torch.ones(4, 8))
    graph.replay(StepSize(3, 3, 1, 1))
    assert torch.equal(x, torch.full((4, 8), 2.0))


@torch.inference_mode()
def test_a_step_shares_memory_among_its_layers(threads: ThreadPool, operators: Operators) -> None:
    """Six layers need what one needs."""
    graph = TapeCapture(threads).capture(lambda size: compute(operators, size), MOST)
    assert graph.arena.num_bytes <= 4 * (MOST.num_tokens * (128 + 6 * 64) + MOST.num_logits * 2 * 64)


@torch.inference_mode()
def test_arguments_may_count_sequences(threads: ThreadPool, operators: Operators) -> None:
    def step(size: StepSize) -> StepOutput:
        operators.scale(x[: size.num_seqs], 3.0)
        return compute(operators, size)

    x = torch.ones(4, 8)
    TapeCapture(threads).capture(step, MOST).replay(StepSize(5, 5, 1, 3))
    assert x[:, 0].tolist() == [3, 3, 3, 1]


HELD = torch.ones(2, 3)
COMPUTING: dict[str, Callable[[Tensor], object]] = {
    "aten.add.Tensor": lambda x: x + 1,
    "aten.mul_.Tensor": lambda x: x.mul_(2),
    "aten.contiguous.default": lambda x: x.t().contiguous(),
    "aten.cat.default": lambda x: torch.cat((x, x)),
    "aten.zeros.default": lambda x: torch.zeros(3),
    "aten.item.default": lambda x: x[0, 0].item(),
    "aten.matmul.default": lambda x: x @ x.t(),
}


@pytest.mark.parametrize("name", COMPUTING)
@torch.inference_mode()
def test_what_torch_computes_is_named(threads: ThreadPool, operators: Operators, name: str) -> None:
    def step(size: StepSize) -> StepOutput:
        COMPUTING[name](HELD)
        return compute(operators, size)

    with pytest.raises(NotCapturable, match="which a recorded step cannot hold") as caught:
        TapeCapture(threads).capture(step, MOST)
    assert name.rpartition(".")[0] in str(caught.value)
    assert threads.tape is None


class Wide(ctypes.Structure):
    _fields_ = (("first", ctypes.c_int64), ("second", ctypes.c_int64))


DIFFERENT: dict[str, tuple[str, Callable[[Operators, StepSize], object]]] = {
    "square": ("Wide does not grow", lambda o, size: o.context.threads.run(1, Wide(5, size.num_tokens**2))),
    "parts": ("Wide does not grow", lambda o, size: o.context.threads.run(1, Wide(5, -(-size.num_tokens // 16)))),
    "fewer": ("Wide does not grow", lambda o, size: o.context.threads.run(1, Wide(5, 7 - size.num_seqs))),
    "address": ("Wide does not grow", lambda o, size: o.context.threads.run(1, Wide(5, size.num_logits << 40))),
    "branch": ("are others for few", lambda o, size: size.num_tokens > 20 and o.scale(HELD, 1.0)),
    "memory": ("memory of a step", lambda o, size: torch.empty(400 - size.num_tokens)),
    "more memory": ("memory of a step", lambda o, size: size.num_tokens > 20 or torch.empty(20000)),
}


@pytest.mark.parametrize("name", DIFFERENT)
@torch.inference_mode()
def test_a_step_that_is_another_one_at_another_size_is_refused(
    threads: ThreadPool, operators: Operators, name: str
) -> None:
    reason, change = DIFFERENT[name]

    def step(size: StepSize) -> StepOutput:
        change(operators, size)
        return compute(operators, size)

    with pytest.raises(NotCapturable, match=reason):
        TapeCapture(threads).capture(step, MOST)


def test_a_step_that_fails_leaves_nothing_behind(threads: ThreadPool, operators: Operators) -> None:
    def step(size: StepSize) -> StepOutput:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        TapeCapture(threads).capture(step, MOST)
    assert threads.tape is None
    operators.rows(TABLE, torch.tensor([1]))


class Counting(Model):
    """Says how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def forward(self, batch: ForwardBatch) -> Tensor:
        self.calls += 1
        return torch.zeros(batch.num_tokens, 4)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden + 1


class Replays(Graph):
    def __init__(self) -> None:
        self.sizes: list[StepSize] = []

    def replay(self, size: StepSize) -> StepOutput:
        self.sizes.append(size)
        return torch.zeros(size.num_tokens, 4), torch.zeros(size.num_logits, 4)


class Capture(GraphCapture):
    """Captures if it is told no reason not to."""

    def __init__(self, refusal: str = "") -> None:
        self.graph, self.refusal = Replays(), refusal

    def capture(self, step: Callable[[StepSize], StepOutput], most: StepSize) -> Graph:
        if self.refusal:
            raise NotCapturable(self.refusal)
        hidden, logits = step(most)
        assert logits is not None
        assert (len(hidden), len(logits)) == (most.num_tokens, most.num_logits)
        return self.graph


def batch(size: StepSize, **changes: Any) -> ForwardBatch:
    starts = np.arange(size.num_seqs + 1) * size.num_tokens // size.num_seqs
    values = {
        "token_ids": torch.arange(size.num_tokens),
        "positions": torch.arange(size.num_tokens),
        "query_start": torch.from_numpy(starts),
        "seq_lens": torch.from_numpy(np.diff(starts)),
        "logits_indices": torch.arange(size.num_logits),
        "kv_groups": [],
        "query_start_np": starts,
        "seq_lens_np": np.diff(starts),
        "is_decode": size.num_tokens == size.num_seqs,
    }
    return ForwardBatch(**{**values, **changes})


def prepared(operators: Operators, capture: Capture) -> tuple[CapturedStepModel, Counting]:
    model = Counting()
    steps = CapturedStepModel(model, torch.zeros(1, dtype=torch.int64), operators, capture, MOST)
    steps.prepare(batch)
    return steps, model


def test_steps_of_all_sizes_are_replayed(operators: Operators) -> None:
    capture = Capture()
    steps, model = prepared(operators, capture)
    sizes = [StepSize(2, 2, 2, 2), StepSize(40, 40, 0, 1), StepSize(7, 7, 2, 3), StepSize(7, 7, 2, 3)]
    for size in sizes:
        hidden, _ = steps.run(batch(size))
        assert hidden.shape == (size.num_tokens, 4)
    assert capture.graph.sizes == sizes
    assert model.calls == 1
    assert steps.refusal == ""


OTHERS: dict[str, tuple[StepSize, dict[str, Any]]] = {
    "tokens": (StepSize(41, 41, 1, 1), {}),
    "logits": (StepSize(30, 30, 25, 1), {}),
    "sequences": (StepSize(30, 30, 5, 5), {}),
    "features": (StepSize(2, 2, 2, 2), {"is_eager": True}),
    "images": (StepSize(2, 2, 2, 2), {"extras": {"image": 1}}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_steps_are_computed_operator_by_operator(operators: Operators, name: str) -> None:
    size, changes = OTHERS[name]
    capture = Capture()
    steps, model = prepared(operators, capture)
    hidden, logits = steps.run(batch(size, **changes))
    assert logits is not None
    assert (len(hidden), len(logits)) == (size.num_tokens, size.num_logits)
    assert steps.run(batch(size._replace(num_logits=0), is_eager=True))[1] is None
    assert model.calls == 3
    assert capture.graph.sizes == []


def test_a_model_that_cannot_be_captured_runs_and_says_why(operators: Operators) -> None:
    steps, model = prepared(operators, Capture("it is too odd"))
    hidden, logits = steps.run(batch(StepSize(5, 5, 2, 1)))
    assert logits is not None
    assert (len(hidden), len(logits), model.calls) == (5, 2, 1)
    assert steps.refusal == "it is too odd"
