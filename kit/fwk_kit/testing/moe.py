"""What every runner of mixtures of experts must do."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fwk.interfaces.moe import EXPERT_PARALLEL, ExpertWeights, MoEContext, MoERunner
from fwk.plugins import Registered
from fwk_kit.testing.served import ServedSuite
from fwk_kit.testing.serving import MIXTURE

EXPERTS, TOP_K, HIDDEN, INNER = 6, 2, 32, 48


class Experts(ExpertWeights):
    """Random experts, as layers and as plain numbers."""

    def __init__(self, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=random) / HIDDEN**0.5
        self.down = torch.randn(EXPERTS, HIDDEN, INNER, generator=random) / INNER**0.5

    def layers(self, expert: int):  # type: ignore[no-untyped-def]
        return (lambda x: F.linear(x, self.gate_up[expert])), (lambda x: F.linear(x, self.down[expert]))

    def stacked(self) -> tuple[Tensor, Tensor]:
        return self.gate_up, self.down

    def part(self, first: int, count: int) -> Experts:
        """Those of one rank: ``count`` from ``first`` on."""
        found = Experts()
        found.gate_up, found.down = self.gate_up[first : first + count], self.down[first : first + count]
        return found


def routed(num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their experts and the experts' weights."""
    random = torch.Generator().manual_seed(seed + num_tokens)
    x = torch.randn(num_tokens, HIDDEN, generator=random)
    ids = torch.rand(num_tokens, EXPERTS, generator=random).argsort(-1)[:, :TOP_K]
    return x, ids, torch.rand(num_tokens, TOP_K, generator=random)


def reference(experts: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Every token and expert written out, in float64."""
    out = torch.zeros_like(x, dtype=torch.float64)
    gate_up, down = experts.gate_up.double(), experts.down.double()
    for token in range(len(x)):
        for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
            gate, up = (gate_up[expert] @ x[token].double()).chunk(2)
            out[token] += weight * (down[expert] @ (F.silu(gate) * up))
    return out


class MoERunnerSuite(ServedSuite):
    """Against experts written out in float64, and within a tiny model."""

    family = "moe"
    interface = MoERunner
    model_config = MIXTURE
    tolerance: ClassVar[float] = 1e-4

    def runner(self, item: Registered, experts: Experts, ep_size: int = 1) -> MoERunner:
        """A runner with its weights read; ``experts`` are those of one rank."""
        cpu, dtype, count = torch.device("cpu"), torch.float32, EXPERTS // ep_size
        context = MoEContext(count, TOP_K, HIDDEN, INNER, "silu", dtype, cpu, self.given(item), ep_size=ep_size)
        made: MoERunner = self.make(item, context)
        with torch.inference_mode():
            made.load(experts)
        return made

    def exercise(self, item: Registered) -> None:
        self.test_equals_the_reference(item)

    def test_equals_the_reference(self, item: Registered) -> None:
        experts = Experts()
        runner = self.runner(item, experts)
        for num_tokens in (1, 2, 17, 64):
            x, ids, weights = routed(num_tokens)
            before = x.clone()
            with torch.inference_mode():
                out = runner.apply(x, ids, weights)
            assert torch.equal(x, before), "apply() changed its input"
            wanted = reference(experts, x, ids, weights)
            torch.testing.assert_close(out.double(), wanted, atol=self.tolerance, rtol=self.tolerance)

    def test_all_tokens_at_one_expert(self, item: Registered) -> None:
        experts = Experts()
        x, _, weights = routed(9)
        ids = torch.tensor([[4, 1]]).expand(9, -1).contiguous()
        with torch.inference_mode():
            out = self.runner(item, experts).apply(x, ids, weights)
        wanted = reference(experts, x, ids, weights)
        torch.testing.assert_close(out.double(), wanted, atol=self.tolerance, rtol=self.tolerance)

    def test_no_tokens(self, item: Registered) -> None:
        runner = self.runner(item, Experts())
        assert runner.apply(*routed(0)).shape == (0, HIDDEN)

    def test_a_token_gets_the_same_beside_others(self, item: Registered) -> None:
        runner = self.runner(item, Experts())
        x, ids, weights = routed(33)
        with torch.inference_mode():
            together = runner.apply(x, ids, weights)
            alone = [runner.apply(x[i : i + 1], ids[i : i + 1], weights[i : i + 1]) for i in range(33)]
        torch.testing.assert_close(torch.cat(alone), together, atol=self.tolerance, rtol=self.tolerance)

    def test_two_layers_have_experts_of_their_own(self, item: Registered) -> None:
        made = [Experts(1), Experts(2)]
        runners = [self.runner(item, experts) for experts in made]
        for runner, experts in zip(runners, made, strict=True):
            with torch.inference_mode():
                out = runner.apply(*routed(3))
            wanted = reference(experts, *routed(3))
            torch.testing.assert_close(out.double(), wanted, atol=self.tolerance, rtol=self.tolerance)

    def test_experts_of_other_ranks_add_nothing(self, item: Registered) -> None:
        """What two ranks compute adds up to all of it, and what only the other one computes is not looked at."""
        if EXPERT_PARALLEL not in item.declaration.abilities():
            pytest.skip(f"{item.name} does not have {EXPERT_PARALLEL} among its offers")
        experts, count = Experts(), EXPERTS // 2
        x, ids, weights = routed(40)
        total = torch.zeros_like(x)
        for first in (0, count):
            runner = self.runner(item, experts.part(first, count), ep_size=2)
            is_elsewhere = ((ids < first) | (ids >= first + count)).all(-1)
            assert 0 < is_elsewhere.sum() < len(x)
            given = x.masked_fill(is_elsewhere.unsqueeze(-1), torch.nan)
            with torch.inference_mode():
                part = runner.apply(given, ids - first, weights)
                none = runner.apply(given[is_elsewhere], (ids - first)[is_elsewhere], weights[is_elsewhere])
            assert not part[is_elsewhere].any(), "a token all of whose experts are on other ranks got something"
            assert not none.any(), "a step all of whose experts are on other ranks gave something"
            total += part
        wanted = reference(experts, x, ids, weights)
        torch.testing.assert_close(total.double(), wanted, atol=self.tolerance, rtol=self.tolerance)
