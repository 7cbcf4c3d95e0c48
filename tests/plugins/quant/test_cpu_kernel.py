"""The native kernel of float matrices against float64, with every instruction set this machine has."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.isas import isa_params
from torch import Tensor

import fwk_native as native
from fwk_native.thread_pool import ThreadPool
from fwk_quant._linear_cpu.kernel import FloatKernel

pytestmark = pytest.mark.skipif(native.refusal() is not None, reason="no C++ compiler")

SIZES = [(1, 1), (32, 64), (33, 7), (70, 68), (5, 333), (100, 97), (192, 576)]
"""(out_features, in_features); none is a multiple of anything in most."""

NUM_TOKENS = [0, 1, 2, 3, 5, 11, 12, 13, 14, 40, 99, 100]
"""Around the rows of a tile, those that are not put side by side, and a block of rows."""

SHARED_AND_OWN = (100, 600)
"""Outputs of a matrix for which two threads share the rows they prepare, and of one for which each has its own."""


@pytest.fixture(scope="module", params=isa_params(native.EMULATED_AMX))
def kernel(request: pytest.FixtureRequest) -> FloatKernel:
    return FloatKernel(ThreadPool(2), request.param)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def check_close(mine: Tensor, exact: Tensor, largest: Tensor) -> None:
    """As close as float32 sums and one rounding to the result's dtype allow. largest: of sums of magnitudes."""
    assert mine.dtype in (torch.float32, torch.bfloat16)
    rounding = exact.abs() * 2.0**-8 if mine.dtype == torch.bfloat16 else 0
    assert bool(((mine.double() - exact).abs() <= rounding + largest * 2.0**-20).all())


@pytest.mark.gate(20)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equals_a_product_in_float64(size: tuple[int, int], dtype: torch.dtype, kernel: FloatKernel) -> None:
    out_features, in_features = size
    weight, bias = random(*size, dtype=dtype), random(out_features, dtype=dtype)
    matrix = kernel.pack(weight)
    for rows in NUM_TOKENS:
        wide = random(rows, in_features + 3, dtype=dtype)
        for x in (wide[:, 1 : 1 + in_features], wide[:, :in_features].contiguous()):
            for b in (None, bias):
                shift = torch.zeros(1).double() if b is None else b.double()
                exact = x.double() @ weight.double().t() + shift
                largest = x.double().abs() @ weight.double().abs().t() + shift.abs()
                check_close(kernel.apply(matrix, x, b), exact, largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("out_features", SHARED_AND_OWN)
def test_a_row_is_the_same_in_any_batch_and_on_any_number_of_threads(
    out_features: int, dtype: torch.dtype, kernel: FloatKernel, request: pytest.FixtureRequest
) -> None:
    weight, x = random(out_features, 333, dtype=dtype), random(150, 333, dtype=dtype)
    matrix = kernel.pack(weight)
    whole = kernel.apply(matrix, x, None)
    for first, end in ((0, 1), (149, 150), (3, 16), (50, 150)):
        assert torch.equal(kernel.apply(matrix, x[first:end], None), whole[first:end])
    assert torch.equal(kernel.pack(weight).words, matrix.words)
    instructions = request.node.callspec.params["kernel"]  # which packed the matrix
    alone, pair, crowd = (FloatKernel(ThreadPool(size), instructions) for size in (1, 2, 5))
    assert torch.equal(alone.apply(matrix, x, None), whole)
    for some in (x, x.repeat(3, 1)):
        assert torch.equal(alone.apply(matrix, some, None), pair.apply(matrix, some, None))
        assert torch.equal(alone.apply(matrix, some, None), crowd.apply(matrix, some, None))


def awkward(rows: int, columns: int) -> Tensor:
    """Weights of bfloat16 among which are zeros of both signs, subnormal ones and some far smaller than the others."""
    weight = random(rows, columns, dtype=torch.bfloat16)
    places = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(1))
    for value, some in zip(
        (0.0, -0.0, 1e-40, -1e-39, 1e-7, -1e-20), places[: rows * columns // 800 * 6].split(6), strict=False
    ):
        weight.view(-1)[some] = value
    return weight


@pytest.mark.parametrize("size", [(33, 50), (64, 576), (200, 333)], ids=str)
def test_weights_come_back_bit_by_bit(size: tuple[int, int], kernel: FloatKernel) -> None:
    weight = awkward(*size)
    rows = kernel.rows(kernel.pack(weight), torch.arange(size[0]), torch.bfloat16)
    assert torch.equal(rows.view(torch.int16), weight.view(torch.int16))


def test_rows_that_no_cache_has_room_for_are_the_same(kernel: FloatKernel) -> None:
    matrix, x = kernel.pack(random(70, 1536, dtype=torch.bfloat16)), random(700, 1536, dtype=torch.bfloat16)
    whole = kernel.apply(matrix, x, None)
    for rows in (slice(0, 40), slice(330, 420), slice(640, 700)):
        assert torch.equal(kernel.apply(matrix, x[rows], None), whole[rows])


def test_short_weights_are_the_weights() -> None:
    kernel, long = FloatKernel(ThreadPool(2)), FloatKernel(ThreadPool(2), shortens=False)
    for size in ((33, 50), (64, 576), (200, 333)):
        weight = awkward(*size)
        short, plain = kernel.pack(weight), long.pack(weight)
        assert (plain.words.shape[1] > short.words.shape[1]) == (native.isa() == "avx512_bf16")
        for num_tokens in (1, 4, 7, 12, 13, 32, 100):
            x = random(num_tokens, size[1], dtype=torch.bfloat16)
            exact, largest = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
            check_close(kernel.apply(short, x, None), exact, largest)
            check_close(long.apply(plain, x, None), exact, largest)


def test_weights_of_too_many_sizes_keep_their_bits() -> None:
    kernel = FloatKernel(ThreadPool(2))
    weight = random(64, 64, dtype=torch.bfloat16) * 2.0 ** -torch.arange(64).bfloat16()
    matrix = kernel.pack(weight)
    assert matrix.words.shape[1] == 32, "two to a word"
    assert torch.equal(kernel.rows(matrix, torch.arange(64), torch.bfloat16), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_no_number_stays_in_its_row(dtype: torch.dtype, kernel: FloatKernel) -> None:
    matrix, x = kernel.pack(random(40, 20, dtype=dtype)), random(14, 20, dtype=dtype)
    x[3, 7], x[5, 0] = float("nan"), float("inf")
    y = kernel.apply(matrix, x, None)
    assert bool(y[3].isnan().all())
    assert not bool(y[5].isfinite().any())
    assert bool(y[[0, 1, 2, 4, *range(6, 14)]].isfinite().all())


def test_tiles_are_given_back() -> None:
    kernel = FloatKernel(ThreadPool(3), native.EMULATED_AMX)
    kernel.apply(kernel.pack(random(100, 64, dtype=torch.bfloat16)), random(50, 64, dtype=torch.bfloat16), None)
    assert native.load(kernel.source, native.EMULATED_AMX).emulated_tiles_in_use() == 0


def test_wrong_inputs_are_refused(kernel: FloatKernel) -> None:
    matrix = kernel.pack(torch.zeros(4, 6))
    for x in (torch.zeros(2, 5), torch.zeros(6), torch.zeros(2, 6, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"a matrix of 6 inputs for torch\.float32 was given"):
            kernel.apply(matrix, x, None)
