"""Experts in slots: in every format and by every runner, the ranks' sum stays the layer's, also after they moved."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.models import make_quantised_context
from tests.helpers.ranks import Rank
from torch import Tensor

from fwk.errors import ModelLoadError
from fwk.interfaces.expert_placement import ExpertPlacement, PlacedLayer, PlacementShape
from fwk.interfaces.moe import MoEContext, MoERunner, Routing
from fwk.plugins import discover, find, load_object
from fwk_layers import MoE
from fwk_native.thread_pool import ThreadPool

ROUTING = Routing(8, 3, normalises=True)
CASES = [
    ("torch", "float32", "none"),
    ("torch", "float32", "int8"),
    ("torch", "float32", "int4"),
    ("torch", "float32", "fp8"),
    ("cpu", "float32", "none"),
    ("cpu", "bfloat16", "none"),
    ("cpu", "bfloat16", "int8"),
    ("cpu", "bfloat16", "int4"),
    ("cpu", "bfloat16", "fp8"),
    ("triton", "float32", "none"),
    ("triton", "float32", "int8"),
]
TRIVIAL = [*range(8), 0, 1]
OTHERS = [[5, 5, 1, 2, 0, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0, 3, 3], TRIVIAL]


class Given(ExpertPlacement):
    """Slots as a test gives them."""

    def __init__(self, slots: Sequence[int], *, by_row: bool = False) -> None:
        self.given, self.by_row, self.counts = slots, by_row, True
        self.layers: list[PlacedLayer] = []

    def shape(self, name: str, routing: Routing) -> PlacementShape:
        return PlacementShape(routing.num_experts, len(self.given), 2)

    def slots(self, name: str, shape: PlacementShape) -> Sequence[int]:
        return self.given

    def add(self, layer: PlacedLayer) -> None:
        self.layers.append(layer)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    make_checkpoint(folder, "qwen3_moe", num_hidden_layers=1)
    return folder


def layer(folder: Path, case: tuple[str, str, str], rank: int, placement: Given | None) -> tuple[MoE, Any]:
    runner, dtype, quantization = case
    kind = load_object(find(discover(), "moe", runner))

    def build(context: MoEContext) -> MoERunner:
        return kind(replace(context, threads=ThreadPool(2)))

    given: dict[str, Any] = {"dtype": getattr(torch, dtype), "quantization": quantization}
    if placement is not None:
        given |= {"tp": Rank(rank, 2), "ep_size": 2}
    context = make_quantised_context(folder, **given)
    context.moe_runner, context.expert_placement = build, placement
    with torch.inference_mode():
        return MoE(context, "model.layers.0.mlp", ROUTING, intermediate_size=128), context


def tokens(count: int, dtype: str = "float32") -> Tensor:
    return torch.randn(count, 128, generator=torch.Generator().manual_seed(5)).to(getattr(torch, dtype))


@pytest.mark.gate(1)
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_ranks_add_up_to_the_layer_wherever_experts_are(
    case: tuple[str, str, str], by_row: bool, mixture: Path
) -> None:
    """Against one rank with all experts in the same format: the weights are the same to the bit, sums are not."""
    if case[0] == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("runs in Triton's interpreter")
    near = 1e-5 if case[1] == "float32" else 2.0**-7  # each rank rounds its part
    x = tokens(5 if case[0] == "triton" else 23, case[1])
    placements = [Given(TRIVIAL, by_row=by_row) for _ in range(2)]
    with torch.inference_mode():
        wanted = layer(mixture, case, 0, None)[0](x).float()
        ranks = [layer(mixture, case, rank, placement)[0] for rank, placement in enumerate(placements)]
        for slots in (TRIVIAL, OTHERS[0]) if case[0] == "triton" else (TRIVIAL, *OTHERS):
            for placement in placements:
                placement.layers[0].place(slots)
                assert placement.layers[0].slots == tuple(slots)
            found = sum(rank(x).float() for rank in ranks)
            torch.testing.assert_close(found, wanted, rtol=near, atol=near * float(wanted.abs().max()))


CASE = ("torch", "float32", "none")


def to_runner(moe: MoE, ids: Tensor) -> Tensor:
    """The ids that the runner of a rank's slots is asked for."""
    seen: list[Tensor] = []
    inner: Any = moe.runner._runner  # type: ignore[attr-defined]
    inner.apply = lambda x, ids, weights: (seen.append(ids), x)[1]
    with torch.inference_mode():
        moe.runner.apply(tokens(len(ids)), ids, torch.ones(ids.shape))
    return seen[0]


def test_each_expert_of_a_token_is_computed_once_and_replicas_share_tokens(mixture: Path) -> None:
    """What reaches the runner, of 200 tokens and each way to choose replicas."""
    ids = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(i))[:3] for i in range(200)])
    for by_row in (False, True):
        seen: list[Tensor] = []
        for rank in range(2):
            placement = Given([0, 1, 2, 3, 0, 4, 5, 6, 7, 0], by_row=by_row)
            moe, _ = layer(mixture, CASE, rank, placement)
            seen.append(to_runner(moe, ids))
            counts = placement.layers[0].counts
            assert counts is not None
            assert counts.tolist() == ids.flatten().bincount(minlength=8).tolist()
        one, two = seen
        assert ((one >= 0) ^ (two >= 0)).all()
        number = int((ids == 0).sum())
        shares = [int((own == slot).sum()) for own, slot in ((one, 0), (one, 4), (two, 4))]
        assert sum(shares) == number
        assert min(shares) > number / 6


def test_a_static_replica_follows_from_the_token_alone(mixture: Path) -> None:
    """Alone and in any place among others: the same bits; by rows, others."""
    x, same = tokens(40), []
    for by_row in (False, True):
        with torch.inference_mode():
            moe, _ = layer(mixture, CASE, 0, Given([*range(8), *range(8)], by_row=by_row))
            together, apart = moe(x), torch.cat([moe(x[row : row + 1]) for row in range(40)])
        same.append(bool(((together == 0) == (apart == 0)).all()))
    assert same == [True, False]


def test_only_experts_that_are_new_to_a_rank_are_read(mixture: Path) -> None:
    placement = Given(TRIVIAL)
    _, context = layer(mixture, CASE, 0, placement)
    asked: list[str] = []
    read = context.weights.tensor_as

    def tensor_as(name: str, *given: Any) -> Tensor:
        asked.append(name)
        return read(name, *given)

    context.weights.tensor_as = tensor_as
    with torch.inference_mode():
        placement.layers[0].place([4, 3, 6, 3, 0, 5, 6, 7, 1, 2])
    assert {name.split(".")[5] for name in asked} == {"6"}
    del asked[:]
    with torch.inference_mode():
        placement.layers[0].place([4, 3, 6, 3, 0, 2, 1, 7, 6, 5])  # the other rank's
    assert not asked


def test_groups_of_experts_that_do_not_divide_are_refused(mixture: Path) -> None:
    with pytest.raises(ModelLoadError, match="do not divide by 2"):
        layer(mixture, CASE, 0, Given([*range(8), 0]))
