"""What every set of operators must do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from fwk.interfaces.declaration import Facts
from fwk.interfaces.moe import Routing
from fwk.interfaces.operators import OperatorContext, Operators
from fwk.interfaces.quant import RoundedRows
from fwk.plugins import Registered
from fwk_kit.testing.served import ServedSuite
from fwk_native.thread_pool import ThreadPool

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [1, 15, 16, 17, 576]
NUM_ROWS = [0, 1, 33]
EPS = 1e-5

ROUTINGS = [
    Routing(8, 2),
    Routing(128, 8, normalises=True),
    Routing(33, 4, normalises=True, is_sigmoid=True, scale=2.5),
    Routing(16, 3, num_groups=4, top_groups=2),
    Routing(64, 6, True, 1.5, num_groups=8, top_groups=3, is_sigmoid=True, has_correction=True),
]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "swish": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_pytorch_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 2.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale).to(dtype)


def apart(x: Tensor) -> Tensor:
    """The same numbers in rows that stand apart, at addresses that no vector likes."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), math.nan, dtype=x.dtype)
    view = wide[..., 1:-2]
    view.copy_(x)
    return view


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).double()


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype, roundings: int = 1, absolute: float = 1e-6) -> None:
    """Within what so many roundings may do; bfloat16 keeps 8 bits."""
    assert found.dtype == dtype
    assert found.shape == wanted.shape
    is_single = dtype == torch.float32
    relative = 3e-6 if is_single else roundings * 2.0**-8
    torch.testing.assert_close(found.double(), wanted, rtol=relative, atol=max(absolute, 0.0 if is_single else 1e-4))


def normed(x: Tensor, weight: Tensor, dtype: torch.dtype, rounds_last: bool) -> Tensor:
    y = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    return (y if rounds_last else rounded(y, dtype)) * weight.double()


def check_rounded(found: RoundedRows, wanted: Tensor, group: int) -> None:
    """wanted: the same, not rounded. A scale is that of the largest of ``group`` numbers, to the last bit."""
    groups = wanted.float().unflatten(-1, (wanted.shape[-1] // group, group))
    scales = (groups.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
    numbers = (groups / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert (found.dtype, found.shape, found.scales.dtype) == (wanted.dtype, wanted.shape, torch.float32)
    assert torch.equal(found.scales, scales.squeeze(-1))
    assert torch.equal(found.numbers.float(), numbers.flatten(-2).float())


class OperatorsSuite(ServedSuite):
    """Every operator against float64, in both precisions, on rows that lie together and on rows that stand apart.

    sizes: numbers in a row. num_rows_together: rows of which each must have the bits that it has alone.
    """

    family = "operators"
    interface = Operators
    sizes: ClassVar[list[int]] = SIZES
    num_rows_together = 200
    num_threads = 1

    def operators(self, item: Registered, dtype: torch.dtype) -> Operators:
        """The operators for activations of ``dtype``, or a skip with the declaration's sentence."""
        refusal = item.declaration.refusal(Facts(dtype=str(dtype).removeprefix("torch.")))
        if refusal is not None:
            pytest.skip(f"{item.name} {refusal}")
        context = OperatorContext(torch.device("cpu"), dtype, self.given(item), ThreadPool(self.num_threads))
        return self.make(item, context)

    def exercise(self, item: Registered) -> None:
        self.test_gate(item, torch.float32, "silu")

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("rounds_last", [False, True])
    def test_rms_norm(self, item: Registered, dtype: torch.dtype, rounds_last: bool) -> None:
        operators = self.operators(item, dtype)
        for size in self.sizes:
            weight = random(size, dtype=torch.float32 if rounds_last else dtype, seed=1)
            for n in NUM_ROWS:
                x = random(n, size, dtype=dtype)
                wanted = normed(x, weight, dtype, rounds_last)
                before = x.clone()
                for given in (x, apart(x)):
                    close(operators.rms_norm(given, weight, EPS, rounds_last=rounds_last), wanted, dtype, 2)
                assert torch.equal(x, before)
        tiny, weight = (
            torch.full((1, 16), 1e-4, dtype=dtype),
            torch.ones(16, dtype=torch.float32 if rounds_last else dtype),
        )
        close(
            operators.rms_norm(tiny, weight, EPS, rounds_last=rounds_last), normed(tiny, weight, dtype, True), dtype, 2
        )

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("rounds_last", [False, True])
    def test_rms_norm_of_heads(self, item: Registered, dtype: torch.dtype, rounds_last: bool) -> None:
        operators = self.operators(item, dtype)
        for heads, size in ((1, 16), (5, 33), (3, 64)):
            whole = random(4, heads + 2, size, dtype=dtype)
            for weight_shape in ((size,), (heads, size)):
                weight = random(*weight_shape, dtype=torch.float32 if rounds_last else dtype, seed=2)
                x = whole[:, :heads]
                found = operators.rms_norm(x, weight, EPS, rounds_last=rounds_last)
                close(found, normed(x, weight, dtype, rounds_last), dtype, 2)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("rounds_last", [False, True])
    def test_add_rms_norm(self, item: Registered, dtype: torch.dtype, rounds_last: bool) -> None:
        operators = self.operators(item, dtype)
        for size in self.sizes:
            weight = random(size, dtype=torch.float32 if rounds_last else dtype, seed=1)
            for n in NUM_ROWS:
                x, residual = random(n, size, dtype=dtype), random(n, size, dtype=dtype, seed=7)
                total = rounded(x.double() + residual.double(), dtype)
                for given in (x, apart(x)):
                    stream = residual.clone()
                    found = operators.add_rms_norm(given, stream, weight, EPS, rounds_last=rounds_last)
                    close(stream, total, dtype, 1)
                    close(found, normed(stream, weight, dtype, rounds_last), dtype, 2)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_rotate(self, item: Registered, dtype: torch.dtype) -> None:
        operators = self.operators(item, dtype)
        for heads, head_size, size in ((1, 8, 8), (3, 64, 64), (2, 34, 34), (5, 80, 32), (2, 6, 2)):
            for n in NUM_ROWS:
                angles = random(n, 1, size // 2, seed=3).double()
                cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
                sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
                x = random(n, heads, head_size, dtype=dtype)
                left, right = x[..., : size // 2].double(), x[..., size // 2 : size].double()
                c, s = cos.double(), sin.double()
                swapped = torch.cat((right, left), -1)
                wanted = x.double().clone()
                wanted[..., :size] = rounded(x[..., :size].double() * c, dtype) + swapped * s
                whole = torch.cat((x, random(n, 2, head_size, dtype=dtype)), 1)
                rest = whole[:, heads:].clone()
                for given in (whole[:, :heads], apart(x)):
                    operators.rotate(given, cos, sin)
                    assert given.shape == wanted.shape
                    bits = 3e-6 if dtype == torch.float32 else 2.0**-7
                    torch.testing.assert_close(given.double(), wanted, rtol=bits, atol=bits)
                assert torch.equal(whole[:, heads:], rest)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("name", ACTIVATIONS)
    def test_gate(self, item: Registered, dtype: torch.dtype, name: str) -> None:
        operators = self.operators(item, dtype)
        for size in self.sizes:
            for n in NUM_ROWS:
                x = random(n, 2 * size, dtype=dtype, scale=4.0)
                gate, up = x.double().split(size, -1)
                wanted = rounded(ACTIVATIONS[name](gate), dtype) * up
                for given in (x, apart(x)):
                    close(operators.gate(given, name), wanted, dtype, 3, 1e-5)
        extremes = torch.tensor([[-1e30, -100.0, -88.0, -0.0, 88.0, 1e30, math.nan, 1.0] + [1.0] * 8], dtype=dtype)
        found = operators.gate(extremes, name)[0]
        assert found[:4].double().abs().max() < 1e-30
        assert torch.equal(found[4:6], extremes[0, 4:6])
        assert found[6].isnan()
        assert not found[7].isnan()

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_rows(self, item: Registered, dtype: torch.dtype) -> None:
        operators = self.operators(item, dtype)
        for shape in ((7, 1), (7, 33), (5, 1, 16), (9, 1100)):
            table = random(*shape, dtype=dtype)
            for indices in ([], [3], [4, 0, 0, 2] * 9):
                at = torch.tensor(indices, dtype=torch.int64)
                assert torch.equal(operators.rows(table, at), table[at])
                close(operators.rows(table, at, 24.0), table[at].double() * 24, dtype)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_join(self, item: Registered, dtype: torch.dtype) -> None:
        operators = self.operators(item, dtype)
        for n in NUM_ROWS:
            parts = [random(n, size, dtype=dtype) for size in (33, 1, 1100)]
            found = operators.join(parts)
            assert torch.equal(found, torch.cat(parts, -1))
            assert found.is_contiguous()
            assert torch.equal(operators.join(parts[:1]), parts[0])

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("routing", ROUTINGS, ids=str)
    def test_choose_experts(self, item: Registered, dtype: torch.dtype, routing: Routing) -> None:
        operators = self.operators(item, dtype)
        for num_tokens in NUM_ROWS:
            order = random(num_tokens, routing.num_experts).argsort(-1)
            logits = (order / 16 - 4).to(dtype)  # no two of a token are equal
            correction = random(routing.num_experts, seed=3) if routing.has_correction else None
            ids, weights = operators.choose_experts(logits, routing, correction)
            wanted_ids, wanted = routing.choose(logits.float(), correction)
            assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
            mine, wanted_order = ids.argsort(-1), wanted_ids.argsort(-1)
            assert torch.equal(ids.gather(-1, mine), wanted_ids.gather(-1, wanted_order))
            close(weights.gather(-1, mine), wanted.gather(-1, wanted_order).double(), torch.float32)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_rounded_outcomes(self, item: Registered, dtype: torch.dtype) -> None:
        """As the operators' own, rounded after: of whole rows, and of groups, of which the last program has few."""
        operators = self.operators(item, dtype)
        if not operators.rounds:
            pytest.skip(f"{item.name} rounds nothing: its rounds is False")
        for size, group in ((1, 1), (48, 48), (1200, 1200), (128, 128), (1152, 128)):
            for n, rounds_last in ((0, False), (1, True), (5, False)):
                x, residual = random(n, size, dtype=dtype), random(n, size, dtype=dtype, seed=7)
                x[1:2] = 0
                given = (random(size, dtype=torch.float32 if rounds_last else dtype, seed=1), EPS)
                wanted = operators.rms_norm(x, *given, rounds_last=rounds_last)
                found = operators.add_rms_norm_rounded(x, None, *given, group, rounds_last=rounds_last)
                check_rounded(found, wanted, group)
                stream, mine = residual.clone(), residual.clone()
                wanted = operators.add_rms_norm(x, stream, *given, rounds_last=rounds_last)
                found = operators.add_rms_norm_rounded(x, mine, *given, group, rounds_last=rounds_last)
                check_rounded(found, wanted, group)
                assert torch.equal(mine, stream)
                both = random(n, 2 * size, dtype=dtype, scale=4.0)
                check_rounded(operators.gate_rounded(both, "silu", group), operators.gate(both, "silu"), group)

    @pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
    def test_what_cannot_be_rounded_shows(self, item: Registered, number: float) -> None:
        operators = self.operators(item, torch.float32)
        if not operators.rounds:
            pytest.skip(f"{item.name} rounds nothing: its rounds is False")
        x = torch.ones(2, 512)
        x[0, 300] = number
        found = operators.gate_rounded(x, "silu", 128)
        values = found.numbers.float().unflatten(1, (2, 128)) * found.scales[..., None]
        assert values.isfinite().all(-1).tolist() == [[False, True], [True, True]]

    def test_a_row_depends_on_no_other(self, item: Registered) -> None:
        """Alone or among others, on one thread or on some: the same bits."""
        operators, n = self.operators(item, torch.bfloat16), self.num_rows_together
        x, residual, weight = (random(*shape, dtype=torch.bfloat16) for shape in ((n, 1152), (n, 1152), (1152,)))
        together = operators.add_rms_norm(x, residual.clone(), weight, EPS)
        gated = operators.gate(x, "silu")
        heads, of_heads = x.view(n, 18, 64), random(18, 64, dtype=torch.bfloat16)
        normed_heads, turned = operators.rms_norm(heads, of_heads, EPS), heads.clone()
        angles = random(n, 1, 64, dtype=torch.bfloat16)
        operators.rotate(turned, angles, angles)
        for row in (0, n * 2 // 5, n - 1):
            one = slice(row, row + 1)
            assert torch.equal(operators.rms_norm(heads[one], of_heads, EPS), normed_heads[one])
            alone = heads[one].clone()
            operators.rotate(alone, angles[one], angles[one])
            assert torch.equal(alone, turned[one])
            assert torch.equal(operators.add_rms_norm(x[one], residual[one].clone(), weight, EPS), together[one])
            assert torch.equal(operators.gate(x[one], "silu"), gated[one])

    def test_an_activation_that_is_not_known_is_named(self, item: Registered) -> None:
        with pytest.raises(Exception, match="softsign"):
            self.operators(item, torch.float32).gate(torch.zeros(1, 2), "softsign")
