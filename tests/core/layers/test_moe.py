"""Routing, and what the MoE layer hands to a runner."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.lazy import lazy
from tests.helpers.models import Tensors, make_context, on_ranks
from torch import Tensor

from fwk.errors import ModelLoadError
from fwk.interfaces.declaration import Facts
from fwk.interfaces.moe import EXPERT_PARALLEL, ExpertWeights, MoEContext, MoERunner, MoERunnerSpec
from fwk.interfaces.parallel import ParallelGroup, SingleRank
from fwk.interfaces.quant import OneFormat
from fwk.types import ModelConfig
from fwk_layers import MoE, OffsetRMSNorm, QKNorm, Routing

modeling_deepseek_v2 = lazy("transformers.models.deepseek_v2.modeling_deepseek_v2")
modeling_gemma3 = lazy("transformers.models.gemma3.modeling_gemma3")
transformers = lazy("transformers")

RAW = {
    "architectures": ["X"],
    "vocab_size": 8,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
}
EXPERTS, INNER = 6, 12


class Keeping(MoERunner):
    """Keeps the stacked weights."""

    def load(self, experts: ExpertWeights) -> None:
        self.gate_up, self.down = experts.stacked()

    def apply(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for token, (ids, factors) in enumerate(zip(expert_ids, weights, strict=True)):
            for expert, factor in zip(ids.tolist(), factors, strict=True):
                gate, up = (self.gate_up[expert] @ x[token]).chunk(2)
                out[token] += factor * (self.down[expert] @ (F.silu(gate) * up))
        return out


class Second(SingleRank):
    """The second of two ranks, alone."""

    rank, size = 1, 2


class Third(SingleRank):
    """The third of four ranks, alone."""

    rank, size = 2, 4


def tensors() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    found = {"m.gate.weight": torch.randn(EXPERTS, 16, generator=random)}
    for expert in range(EXPERTS):
        for name, shape in (("gate", (INNER, 16)), ("up", (INNER, 16)), ("down", (16, INNER))):
            found[f"m.experts.{expert}.{name}_proj.weight"] = torch.randn(shape, generator=random)
    return found


def context(tp: ParallelGroup | None = None, ep_size: int = 1, **changes: Any) -> Any:
    config = ModelConfig.from_dict({**RAW, **changes}, "test")
    return make_context(config, Tensors(tensors()), tp=tp, ep_size=ep_size)


def layer(
    runner: type[MoERunner] | None = None, tp: ParallelGroup | None = None, ep_size: int = 1, **routing: Any
) -> MoE:
    made = context(tp, ep_size)
    if runner is not None:
        made.moe_runner = runner
    return MoE(made, "m", Routing(EXPERTS, 2, **routing), intermediate_size=INNER)


def test_the_reference_runner_equals_experts_written_out() -> None:
    x = torch.randn(9, 16)
    torch.testing.assert_close(layer()(x), layer(Keeping)(x), atol=1e-3, rtol=1e-4)
    assert layer()(x[:0]).shape == (0, 16)


def test_a_token_gets_the_same_whatever_stands_beside_it() -> None:
    x = torch.randn(40, 16)
    moe = layer(normalises=True)
    whole = moe(x)
    torch.testing.assert_close(torch.cat([moe(x[:1]), moe(x[1:33]), moe(x[33:])]), whole, atol=1e-3, rtol=1e-4)


def test_a_rank_holds_its_part_of_every_expert() -> None:
    all_tensors = tensors()
    moe = layer(Keeping, Second())
    assert isinstance(moe.runner, Keeping)
    assert moe.runner.context.intermediate_size == INNER // 2
    mine = slice(INNER // 2, INNER)
    for expert in range(EXPERTS):
        gate, up = moe.runner.gate_up[expert].chunk(2)
        assert torch.equal(gate, all_tensors[f"m.experts.{expert}.gate_proj.weight"][mine])
        assert torch.equal(up, all_tensors[f"m.experts.{expert}.up_proj.weight"][mine])
        assert torch.equal(moe.runner.down[expert], all_tensors[f"m.experts.{expert}.down_proj.weight"][:, mine])
    x = torch.randn(5, 16)
    torch.testing.assert_close(layer(tp=Second())(x), moe(x), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("tp", "experts", "columns"),
    [(Second(), slice(3, 6), slice(0, INNER)), (Third(), slice(3, 6), slice(0, INNER // 2))],
)
def test_a_group_of_ranks_holds_its_own_experts(tp: ParallelGroup, experts: slice, columns: slice) -> None:
    """Experts 3 to 5 of 6, whole or a half of each; of the others it reads nothing, and says so."""
    all_tensors, given = tensors(), context(tp, 2)
    kept: list[Keeping] = []

    def keeping(context: MoEContext) -> MoERunner:
        kept.append(Keeping(context))
        return kept[0]

    given.moe_runner = keeping
    MoE(given, "m", Routing(EXPERTS, 2), intermediate_size=INNER)
    (runner,) = kept
    assert (runner.context.num_experts, runner.context.ep_size) == (3, 2)
    for place, expert in enumerate(range(experts.start, experts.stop)):
        gate, up = runner.gate_up[place].chunk(2)
        assert torch.equal(gate, all_tensors[f"m.experts.{expert}.gate_proj.weight"][columns])
        assert torch.equal(up, all_tensors[f"m.experts.{expert}.up_proj.weight"][columns])
        assert torch.equal(runner.down[place], all_tensors[f"m.experts.{expert}.down_proj.weight"][:, columns])
    others = {name for name in all_tensors if name.startswith(("m.experts.0.", "m.experts.1.", "m.experts.2."))}
    assert given.weights.skipped == others
    assert given.weights.asked == set(all_tensors) - others


@pytest.mark.gate(2)
@pytest.mark.parametrize(("size", "ep_size"), [(2, 2), (6, 3), (4, 2), (3, 3), (6, 6)])
def test_groups_of_ranks_add_up_to_all_experts(size: int, ep_size: int) -> None:
    """One token has all its experts on one rank, another on two; of six ranks, some have nothing for a token."""
    x = torch.randn(9, 16)
    wanted = layer(normalises=True)(x)
    for found in on_ranks(size, lambda tp: layer(None, tp, ep_size, normalises=True)(x)):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_experts_that_do_not_divide_are_refused() -> None:
    message = r"m\.experts: 6 experts do not divide by 4; choose an --expert-parallel-size that divides 6"
    with pytest.raises(ModelLoadError, match=message):
        layer(None, Third(), 4)


def test_a_runner_that_knows_no_other_ranks_is_refused() -> None:
    spec = MoERunnerSpec(name="old", load="x:y")
    assert spec.refusal(Facts()) is None
    assert spec.refusal(Facts(tp_size=2, ep_size=2)) == (
        "computes all experts of a layer, and --expert-parallel-size 2 leaves others to other ranks"
    )
    assert MoERunnerSpec(name="new", load="x:y", offers=frozenset({EXPERT_PARALLEL})).refusal(Facts(ep_size=2)) is None


def test_stacked_weights_are_plain_or_refused() -> None:
    made = context()
    made.quant = OneFormat(type(made.plain)(made.plain.context))
    made.moe_runner = Keeping
    with pytest.raises(ModelLoadError, match=r"m\.experts: this MoE runner computes with plain weights only"):
        MoE(made, "m", Routing(EXPERTS, 2), intermediate_size=INNER)


@pytest.mark.parametrize("groups", [None, (4, 2), (2, 1), (8, 8)])
def test_routing_equals_transformers(groups: tuple[int, int] | None) -> None:
    config = transformers.DeepseekV2Config(
        num_attention_heads=2,
        hidden_size=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        routed_scaling_factor=1.7,
        topk_method="greedy" if groups is None else "group_limited_greedy",
        n_group=groups and groups[0],
        topk_group=groups and groups[1],
    )
    router = modeling_deepseek_v2.DeepseekV2TopkRouter(config)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(50, 16)
    with torch.no_grad():
        logits, wanted, wanted_ids = router(x)
    num, top = groups or (1, 1)
    ids, weights = Routing(8, 2, scale=1.7, num_groups=num, top_groups=top).choose(logits)
    order, wanted_order = ids.argsort(-1), wanted_ids.argsort(-1)
    assert torch.equal(ids.gather(-1, order), wanted_ids.gather(-1, wanted_order))
    torch.testing.assert_close(weights.gather(-1, order), wanted.gather(-1, wanted_order))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((4, 0), "each token cannot have 0 of 4 experts"),
        ((4, 5), "each token cannot have 5 of 4 experts"),
        ((6, 2, False, 1.0, 4, 2), "6 experts cannot be routed to 2 of 4 equal groups"),
        ((6, 3, False, 1.0, 3, 1), "each token cannot have 3 experts out of 1 of 3 groups"),
    ],
)
def test_impossible_routing_is_refused(settings: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        Routing(*settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_offset_norm_equals_gemmas(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(16).to(dtype), (torch.randn(5, 3, 16) * 40).to(dtype)
    made = make_context(ModelConfig.from_dict(RAW, "test"), Tensors({"n.weight": weight}), dtype=dtype)
    reference = modeling_gemma3.Gemma3RMSNorm(16, 1e-5).to(dtype)
    with torch.no_grad():
        reference.weight.copy_(weight)
        before = x.clone()
        torch.testing.assert_close(OffsetRMSNorm(made, "n", 16, 1e-5)(x), reference(x), atol=0, rtol=2e-6)
    assert torch.equal(x, before)


def test_query_key_norm_is_two_norms() -> None:
    torch.manual_seed(1)
    of_q, of_k, x = torch.randn(8), torch.randn(8), torch.randn(4, 3, 8)
    made = make_context(ModelConfig.from_dict(RAW, "test"), Tensors({"a.q_norm.weight": of_q, "a.k_norm.weight": of_k}))
    before = x.clone()
    normed = QKNorm(made, "a", 2, 1)(x)
    torch.testing.assert_close(normed[:, :2], F.rms_norm(x[:, :2], (8,), of_q, 1e-6))
    torch.testing.assert_close(normed[:, 2:], F.rms_norm(x[:, 2:], (8,), of_k, 1e-6))
    assert torch.equal(x, before)
