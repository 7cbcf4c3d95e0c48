"""The operator that computes the largest outputs alone, against the one that computes all, to the bit."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.isas import isa_params
from torch import Tensor

import fwk_native as native
from fwk_native.thread_pool import ThreadPool
from fwk_quant._linear_cpu.kernel import FloatKernel

pytestmark = pytest.mark.skipif(native.refusal() is not None, reason="no C++ compiler")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)

GREEDY = torch.ones(1, dtype=torch.int64)


@pytest.fixture(scope="module", params=isa_params(native.EMULATED_AMX, least="avx2"))
def kernel(request: pytest.FixtureRequest) -> FloatKernel:
    return FloatKernel(ThreadPool(2), request.param)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def check(kernel: FloatKernel, weight: Tensor, x: Tensor) -> float:
    """Both ways, for all rows that may be left out; the share of outputs that were left out."""
    matrix, is_greedy = kernel.pack(weight), torch.zeros(1, dtype=torch.int64)
    screened = kernel.screened(matrix, is_greedy)
    assert screened is not None
    left_out = []
    for first in range(0, len(x), kernel.screened_rows):
        some = x[first : first + kernel.screened_rows]
        is_greedy.fill_(1)
        whole, found = kernel.apply(matrix, some, None), kernel.largest(screened, some)
        is_greedy.fill_(0)
        assert torch.equal(kernel.largest(screened, some).nan_to_num(7), whole.nan_to_num(7))
        assert torch.equal(whole.isnan().any(1), found.isnan().any(1))
        is_same = (found == whole) | (found.isnan() & whole.isnan())
        assert bool((is_same | (found == -torch.inf)).all()), "an output is neither left out nor right"
        assert bool(is_same[whole == whole.amax(1, keepdim=True)].all()), "one of the largest was left out"
        left_out.append((~is_same).float().mean())
    return float(torch.stack(left_out).mean())


@pytest.mark.gate(10)
@DTYPES
@pytest.mark.parametrize("size", [(1, 1), (31, 5), (40, 33), (333, 70), (1000, 576)], ids=str)
def test_the_largest_are_there(size: tuple[int, int], dtype: torch.dtype, kernel: FloatKernel) -> None:
    weight = random(*size, dtype=dtype)
    check(kernel, weight, random(7, size[1], dtype=dtype))
    assert check(kernel, weight, torch.zeros(3, size[1], dtype=dtype)) == 0, "all are equal"
    answers = weight[torch.arange(5) * 7 % size[0]]  # each the likeliest of itself
    assert check(kernel, weight, answers) > (0.5 if size[0] > 300 else -1)


@DTYPES
def test_all_that_are_equal_are_there(dtype: torch.dtype, kernel: FloatKernel) -> None:
    weight = random(700, 96, dtype=dtype)
    weight[[3, 350, 690]] = weight[100].clone()
    weight[500] = torch.nextafter(weight[100].float(), torch.full((96,), 9.0)).to(dtype)
    assert check(kernel, weight, weight[100:101] * torch.tensor([[1.0], [0.01], [300.0]], dtype=dtype)) > 0.5


@pytest.mark.gate(2)
@DTYPES
def test_where_rounding_takes_away_the_most(dtype: torch.dtype, kernel: FloatKernel) -> None:
    """x points to where an output's rounding error does: its bound is reached, and the screen alone would be wrong."""
    weight = random(320, 64, dtype=dtype)
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    lost = weight.float() - (weight.float() / scale).round() * scale
    for output in range(0, 320, 13):
        x = (lost[output] / lost[output].norm()).to(dtype)
        product = (weight[output].double() @ x.double()).item()
        for share in (0.99, 0.9, 0.5):  # another output that is a little smaller, and is rounded to no less
            rival = weight.clone()
            rival[(output + 100) % 320] = (x.double() * (share * product / (x.double() @ x.double()))).to(dtype)
            others = torch.arange(320) % 320 != output
            others[(output + 100) % 320] = False
            rival[others] *= 1e-3
            check(kernel, rival, x.unsqueeze(0))


@DTYPES
def test_sizes_that_hardly_fit(dtype: torch.dtype, kernel: FloatKernel) -> None:
    weight, x = random(300, 40, dtype=dtype), random(4, 40, dtype=dtype)
    for factor in (1e-30, 1e-12, 1e12, 1e18):
        check(kernel, weight * factor, x)
        check(kernel, weight, x * factor)
    mixed = weight.clone()
    mixed[::3] = 0
    mixed[1::3] *= 1e-25
    check(kernel, mixed, x)
    offset = weight * 0.01 + 100  # far from zero, and close to one another
    check(kernel, offset, x.abs())
    check(kernel, offset, -x.abs())


@DTYPES
def test_what_is_no_number_is_found(dtype: torch.dtype, kernel: FloatKernel) -> None:
    weight, x = random(300, 40, dtype=dtype), random(4, 40, dtype=dtype)
    for value in (torch.nan, torch.inf, -torch.inf):
        broken = x.clone()
        broken[2, 5] = value
        check(kernel, weight, broken)
        damaged = weight.clone()
        damaged[123, 7] = value
        check(kernel, damaged, x)


def test_more_rows_are_whole(kernel: FloatKernel) -> None:
    weight, x = random(300, 40), random(kernel.screened_rows + 1, 40)
    matrix = kernel.pack(weight)
    screened = kernel.screened(matrix, GREEDY)
    assert screened is not None
    assert torch.equal(kernel.largest(screened, x), kernel.apply(matrix, x, None))


@pytest.mark.sweep
def test_without_vectors_all_is_computed() -> None:
    kernel = FloatKernel(ThreadPool(1), "plain")
    assert kernel.screened(kernel.pack(torch.ones(4, 4)), GREEDY) is None


@pytest.mark.parametrize("instructions", isa_params(native.EMULATED_AMX, least="avx2"))
def test_any_number_of_threads_leaves_out_the_same(instructions: str) -> None:
    weight = random(3000, 96, dtype=torch.bfloat16)
    found = []
    for size in (1, 2, 5):
        one = FloatKernel(ThreadPool(size), instructions)
        screened = one.screened(one.pack(weight), GREEDY)
        assert screened is not None
        for _ in range(5):
            found.append(one.largest(screened, weight[7:9]))
    assert all(torch.equal(y, found[0]) for y in found)
    assert bool(found[0].isinf().any())


def test_what_rounding_the_outcome_makes_equal_is_there(kernel: FloatKernel) -> None:
    weight = torch.zeros(200, 8, dtype=torch.bfloat16)
    weight[:, 0] = 127  # so that 8 bits hold the others
    weight[5, 1], weight[150, 1], weight[150, 2] = 125, 125, 1
    x = torch.tensor([[0, 8, 1, 0, 0, 0, 0, 0]], dtype=torch.bfloat16)
    y = kernel.apply(kernel.pack(weight), x, None)
    assert y[0, 5] == y[0, 150] == 1000, "of 1000 and 1001"
    assert check(kernel, weight, x) > 0.5


def test_how_x_is_rounded_is_bounded(kernel: FloatKernel) -> None:
    weight = torch.zeros(200, 5)
    weight[:, 4] = -1
    weight[5], weight[150] = torch.tensor([[1.0, 1, 0, 0, 0], [0, 0, 1, 1, 0]])
    steps = torch.tensor([[100.49, 100.49, 100.51, 100.46, 32512]])  # their sums are rounded to 200 and 201
    y = kernel.apply(kernel.pack(weight), steps / 32512, None)
    assert y[0, 5] > y[0, 150]
    assert check(kernel, weight, steps / 32512) > 0.5
