"""What every runner of mixtures of experts must do."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fwk.interfaces.moe import ExpertWeights, MoEContext, MoERunner
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

    def runner(self, item: Registered, experts: Experts) -> MoERunner:
        """A runner with its weights read."""
        cpu, dtype = torch.device("cpu"), torch.float32
        context = MoEContext(EXPERTS, TOP_K, HIDDEN, INNER, "silu", dtype, cpu, self.given(item))
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
