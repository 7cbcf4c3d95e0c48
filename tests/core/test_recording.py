"""Recorded steps: what goes on a tape, what cannot, and whose memory it uses."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from fwk import native
from fwk.interfaces.model import Model
from fwk.interfaces.operators import OperatorContext, Operators
from fwk.plugins import discover, find, load_object
from fwk.team import Team
from fwk.types import ForwardBatch
from fwk.worker.graphs import Captured, CapturedStepModel, Graph, GraphCapture, StepOutput
from fwk.worker.recording import TapeCapture

pytestmark = pytest.mark.skipif(native.refusal() is not None, reason="no C++ compiler")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


TABLE, WEIGHT, HEADS = random(50, 128), random(64, seed=1), random(4, 16, seed=2)
COS, SIN = random(8, 1, 16, seed=3), random(8, 1, 16, seed=4)


@pytest.fixture
def team() -> Team:
    return Team(2)


@pytest.fixture
def operators(team: Team) -> Operators:
    cls = load_object(find(discover(), "operators", "cpu"))
    return cls(OperatorContext(torch.device("cpu"), torch.float32, team=team))


def compute(operators: Operators, ids: Tensor) -> StepOutput:
    """[n] to two times [n, 64], by native operators, views and memory alone."""
    n = len(ids)
    residual = operators.gate(operators.rows(TABLE, ids), "silu")
    x = operators.rms_norm(residual, WEIGHT, 1e-5)
    for _ in range(6):
        heads = operators.rms_norm(x.view(n, 4, 16), HEADS, 1e-5)
        operators.rotate(heads[:, :3], COS[:n], SIN[:n])
        x = operators.add_rms_norm(heads.reshape(n, -1), residual, WEIGHT, 1e-5)
    return residual, x


@torch.inference_mode()
def test_a_replay_computes_with_the_inputs_of_its_time(team: Team, operators: Operators) -> None:
    capture, buffer = TapeCapture(team), torch.zeros(8, dtype=torch.int64)
    graphs: dict[int, Graph] = {}
    for size in (3, 1, 8):
        buffer[:size] = torch.arange(size)
        captured = capture.capture(lambda size=size: compute(operators, buffer[:size]))
        assert captured.graph is not None, captured.refusal
        graphs[size] = captured.graph
        wanted = compute(operators, buffer[:size])
        assert all(torch.equal(x, y) for x, y in zip(captured.output, wanted, strict=True))  # type: ignore[arg-type]
    assert team.tape is None
    for turn in range(4):
        for size, graph in graphs.items():
            buffer[:size] = torch.from_numpy(np.random.default_rng(turn).integers(0, 50, size))
            found = graph.replay()
            wanted = compute(operators, buffer[:size])
            assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))  # type: ignore[arg-type]


@torch.inference_mode()
def test_steps_share_memory_and_give_it_back(team: Team, operators: Operators) -> None:
    """Six layers need what one needs, and steps of other sizes what the largest needs, and again as much."""
    capture = TapeCapture(team)
    ids = torch.arange(8)
    first = capture.capture(lambda: compute(operators, ids)).graph
    whole = capture.arena.num_bytes
    assert whole <= 2 * 4 * 8 * (128 + 6 * 64 + 64)
    for size in (1, 2, 3, 5, 7, 8):
        graph = capture.capture(lambda size=size: compute(operators, ids[:size])).graph
        assert graph is not None
    assert capture.arena.num_bytes <= 2 * whole
    assert first is not None
    assert torch.equal(cast(Tensor, first.replay()[1]), cast(Tensor, compute(operators, ids)[1]))


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
def test_what_torch_computes_is_named_and_the_step_is_right_all_the_same(
    team: Team, operators: Operators, name: str
) -> None:
    ids = torch.tensor([4, 2])

    def step() -> StepOutput:
        COMPUTING[name](HELD)
        return compute(operators, ids)

    captured = TapeCapture(team).capture(step)
    assert captured.graph is None
    assert name.rpartition(".")[0] in captured.refusal
    assert "which a recorded step cannot hold" in captured.refusal
    assert torch.equal(cast(Tensor, captured.output[1]), cast(Tensor, compute(operators, ids)[1]))


def test_a_step_that_fails_leaves_nothing_behind(team: Team, operators: Operators) -> None:
    def step() -> StepOutput:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        TapeCapture(team).capture(step)
    assert team.tape is None
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
    def __init__(self, output: StepOutput) -> None:
        self.output, self.count = output, 0

    def replay(self) -> StepOutput:
        self.count += 1
        return self.output


class Capture(GraphCapture):
    """Captures steps of fewer than five sequences."""

    def __init__(self) -> None:
        self.graphs: list[Replays] = []

    def capture(self, step: Callable[[], StepOutput]) -> Captured:
        output = step()
        if len(output[0]) >= 5:
            return Captured(output, None, "five are too many")
        self.graphs.append(Replays(output))
        return Captured(output, self.graphs[-1])


def decode(size: int, **changes: Any) -> ForwardBatch:
    whole = torch.arange(size)
    values = {
        "token_ids": whole,
        "positions": whole,
        "query_start": torch.arange(size + 1),
        "seq_lens": whole + 1,
        "logits_at": whole,
        "kv_groups": [],
        "query_start_np": np.arange(size + 1),
        "seq_lens_np": np.arange(size) + 1,
        "is_decode": True,
    }
    return ForwardBatch(**{**values, **changes})


def test_the_first_step_of_a_size_is_captured_and_the_others_are_replayed() -> None:
    model, capture = Counting(), Capture()
    steps = CapturedStepModel(model, capture, 8)
    for _ in range(3):
        hidden, logits = steps.run(decode(2))
        assert hidden.shape == (2, 4)
        assert logits is not None
    steps.run(decode(4))
    assert model.calls == 2
    assert [graph.count for graph in capture.graphs] == [2, 0]
    assert steps.sizes == [2, 4]


@pytest.mark.parametrize(
    "changes",
    [
        {"is_decode": False},
        {"logits_at": torch.tensor([1])},
        {"tree_mask": torch.ones(2, 2, dtype=torch.bool)},
        {"adapter_ids": torch.tensor([0, -1])},
        {"extras": {"image": 1}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_other_steps_are_computed_operator_by_operator(changes: dict[str, Any]) -> None:
    model, capture = Counting(), Capture()
    steps = CapturedStepModel(model, capture, 8)
    for _ in range(2):
        hidden, logits = steps.run(decode(2, **changes))
        assert logits is not None
        assert len(logits) == len(changes.get("logits_at", [0, 0]))
        assert len(hidden) == 2
    assert steps.run(decode(2, logits_at=torch.tensor([], dtype=torch.int64)))[1] is None
    steps.run(decode(9))
    assert model.calls == 4
    assert capture.graphs == []


def test_a_refusal_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Counting()
    steps = CapturedStepModel(model, Capture(), 8)
    with caplog.at_level(logging.INFO):
        for size in (5, 6, 5, 6):
            steps.run(decode(size))
    assert model.calls == 4
    assert [record.getMessage() for record in caplog.records] == [
        "decode steps of 5 sequences are computed operator by operator: five are too many"
    ]
    assert steps.refusal == "five are too many"
