"""The native kernel of integer matrices against float64, with every instruction set this machine has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.helpers.isas import isa_params
from torch import Tensor

import fwk_native as native
from fwk_native.thread_pool import ThreadPool
from fwk_quant._linear_cpu import integers
from fwk_quant._linear_cpu.integers import IntegerKernel, Integers, Nested, rounded_together

pytestmark = pytest.mark.skipif(native.refusal() is not None, reason="no C++ compiler")

SIZES = [(70, 192, 32), (33, 128, 16), (33, 100, 2**31), (40, 512, 256)]
"""(out_features, in_features, group); the largest: one scale a row."""

NUM_TOKENS = [0, 1, 5, 14]
"""Around those that are not put side by side, and the rows of a tile."""

FINE_STEPS = 127 * 256 + 127
"""Of a row's largest magnitude, where activations are rounded to 16 bits."""

SHARED_AND_OWN = (70, 600)
"""Outputs of a matrix for which two threads share the rows they prepare, and of one for which each has its own."""

SCHEMES = ["middle", "zeros", "offsets", "nested"]


@pytest.fixture(scope="module", params=isa_params(native.EMULATED_AMX))
def kernel(request: pytest.FixtureRequest) -> IntegerKernel:
    return IntegerKernel(ThreadPool(2), request.param)


def matrix_of(bits: int, size: tuple[int, int, int], scheme: str) -> Integers:
    """Random integers, scales and zeros."""
    rows, columns, group = size
    generator = torch.Generator().manual_seed(bits * columns)
    numbers = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8, generator=generator)
    groups = -(-columns // min(group, columns))
    scales = (torch.rand(rows, groups, generator=generator) + 0.5) / 2**bits

    def nested() -> Nested:
        size = 8 if groups % 8 == 0 else groups
        factors = torch.randn(rows, groups // size, generator=generator).half()
        return Nested(factors, torch.randint(-60, 64, (rows, groups), dtype=torch.int8, generator=generator))

    if scheme == "middle":
        return Integers(bits, numbers, group, scales, 2 ** (bits - 1))
    if scheme == "zeros":
        zeros = torch.randint(0, 2**bits, (rows, groups), dtype=torch.uint8, generator=generator)
        return Integers(bits, numbers, group, scales.half(), zeros)
    if scheme == "offsets":
        offsets = torch.randn(rows, groups, generator=generator).half()
        return Integers(bits, numbers, group, scales.half(), offsets=offsets)
    return Integers(bits, numbers, group, nested(), offsets=nested())


def values(matrix: Integers) -> Tensor:
    """What the matrix stands for, [rows, columns] float64."""
    columns = matrix.numbers.shape[1]

    def by_column(x: Tensor | Nested) -> Tensor:
        if isinstance(x, Nested):
            x = x.factors.double().repeat_interleave(x.size, 1) * x.bytes.double()
        return x.double().repeat_interleave(min(matrix.group, columns), 1)[:, :columns]

    numbers, scales = matrix.numbers.double(), by_column(matrix.scales)
    if matrix.offsets is not None:
        return numbers * scales + by_column(matrix.offsets)
    return (numbers - (matrix.zero if isinstance(matrix.zero, int) else by_column(matrix.zero))) * scales


def rounded(x: Tensor, group: int, count: int) -> tuple[Tensor, Tensor]:
    """x in ``count`` steps of each group's largest magnitude, and a step where x is half way between two, else 0."""
    columns = x.shape[1]
    groups = torch.nn.functional.pad(x.double(), (0, -columns % group)).unflatten(1, (-1, group))
    steps = (groups.abs().amax(-1, keepdim=True) / count).expand_as(groups)
    counts = torch.where(steps > 0, groups / steps, 0)
    is_tie = (counts.frac().abs() - 0.5).abs() < 1e-4 * count / 127
    found = (counts.round() * steps, is_tie * steps)
    return found[0].flatten(1)[:, :columns], found[1].flatten(1)[:, :columns]


CASES = [
    (bits, size, scheme)
    for bits in (8, 6, 5, 4)
    for size in SIZES
    for scheme in SCHEMES
    if rounded_together(bits, size[1], size[2]) is not None
]


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_the_largest_sums_fit(bits: int, kernel: IntegerKernel) -> None:
    """Of the largest integers and activations, which some instructions add up in 16 bits."""
    numbers = torch.full((40, 192), 2**bits - 1, dtype=torch.uint8)
    packed = kernel.pack(Integers(bits, numbers, 64, torch.ones(40, 3), 0))
    for rows, x in ((1, 127.0), (5, -127.0)):
        found = kernel.apply(packed, torch.full((rows, 192), x), None)
        assert torch.equal(found, torch.full((rows, 40), 192 * (2**bits - 1) * x))


@pytest.mark.gate(60)
@pytest.mark.parametrize(("bits", "size", "scheme"), CASES)
def test_equals_a_product_with_rounded_inputs(
    bits: int, size: tuple[int, int, int], scheme: str, kernel: IntegerKernel
) -> None:
    matrix = matrix_of(bits, size, scheme)
    exact, group = values(matrix), rounded_together(bits, size[1], size[2])
    assert group is not None
    group, count = (size[1], FINE_STEPS) if kernel.int16_activations(matrix) else (group, 127)
    packed = kernel.pack(matrix)
    bias = torch.randn(size[0], generator=torch.Generator().manual_seed(1))
    for rows in NUM_TOKENS:
        wide = torch.randn(rows, size[1] + 1, generator=torch.Generator().manual_seed(rows))
        for dtype in (torch.float32, torch.bfloat16):
            x, b = wide[:, 1:].to(dtype), bias.to(dtype)
            mine = kernel.apply(packed, x, b)
            near, ties = rounded(x, group, count)
            wanted = near @ exact.t() + b.double()
            largest = near.abs() @ exact.abs().t() + b.double().abs()
            room = largest * 2.0**-19 + ties @ exact.abs().t()  # which may go either way
            if dtype == torch.bfloat16:
                room = room + wanted.abs() * 2.0**-8
            errors = (mine.double() - wanted).abs()
            assert mine.dtype == dtype
            assert mine.shape == wanted.shape
            assert bool((errors <= room).all())
            if rows:
                assert torch.equal(kernel.apply(packed, x[-1:], b)[0], mine[-1]), "a row depends on its neighbours"


@pytest.mark.parametrize("bits", [8, 6, 5, 4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_are_what_was_packed(bits: int, scheme: str, kernel: IntegerKernel) -> None:
    matrix = matrix_of(bits, (70, 192, 64), scheme)
    indices = torch.tensor([69, 0, 31, 32, 0])
    packed, wanted = kernel.pack(matrix), values(matrix)[indices]
    mine = kernel.rows(packed, indices, torch.float32)
    torch.testing.assert_close(mine.double(), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(kernel.rows(packed, indices, torch.bfloat16), mine.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("bits", "group", "scheme"), [(8, 2**31, "middle"), (8, 12, "zeros"), (6, 16, "nested"), (4, 32, "offsets")]
)
@pytest.mark.parametrize("out_features", SHARED_AND_OWN)
def test_the_number_of_rows_changes_nothing(
    out_features: int, bits: int, group: int, scheme: str, kernel: IntegerKernel
) -> None:
    """Few rows, and many by blocks of AMX where the kernel has them, give the same bits."""
    columns = 300 if group > 300 else 192
    packed, x = kernel.pack(matrix_of(bits, (out_features, columns, group), scheme)), torch.randn(70, columns)
    whole = kernel.apply(packed, x, None)
    for first, end in ((0, 1), (16, 18), (3, 11), (20, 60), (37, 70)):
        assert torch.equal(kernel.apply(packed, x[first:end], None), whole[first:end])


@pytest.mark.parametrize(("bits", "group", "scheme"), [(8, 2**31, "middle"), (4, 32, "offsets")])
def test_rows_that_no_cache_has_room_for_are_the_same(
    bits: int, group: int, scheme: str, kernel: IntegerKernel
) -> None:
    packed, x = kernel.pack(matrix_of(bits, (70, 1536, group), scheme)), torch.randn(700, 1536)
    whole = kernel.apply(packed, x, None)
    for rows in (slice(0, 40), slice(330, 420), slice(640, 700)):
        assert torch.equal(kernel.apply(packed, x[rows], None), whole[rows])


def test_tiles_are_given_back() -> None:
    kernel = IntegerKernel(ThreadPool(3), native.EMULATED_AMX)
    kernel.apply(kernel.pack(matrix_of(4, (100, 192, 64), "zeros")), torch.randn(50, 192), None)
    assert native.load(kernel.source, native.EMULATED_AMX).emulated_tiles_in_use() == 0


@pytest.mark.parametrize("rows", [50, 70, 450])
@pytest.mark.parametrize("out_features", SHARED_AND_OWN)
@pytest.mark.parametrize(("bits", "group", "scheme"), [(4, 64, "zeros"), (8, 2**31, "middle")])
def test_the_number_of_threads_changes_nothing(
    bits: int, group: int, scheme: str, out_features: int, rows: int
) -> None:
    matrix, x = matrix_of(bits, (out_features, 192, group), scheme), torch.randn(rows, 192)
    results: list[Tensor] = []
    for size in (1, 2, 5):
        one = IntegerKernel(ThreadPool(size), native.isas()[-1])
        results.append(one.apply(one.pack(matrix), x, None))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("isa", isa_params(native.EMULATED_AMX, least="amx"))
def test_fine_activations_lose_less_than_bfloat16(isa: str, rows: int) -> None:
    kernel, matrix = IntegerKernel(ThreadPool(2), isa), matrix_of(8, (70, 1000, 2**31), "middle")
    assert kernel.int16_activations(matrix)
    x = torch.randn(rows, 1000)
    x[:, 500] = 30.0
    wanted = x.double() @ values(matrix).t()
    errors = (kernel.apply(kernel.pack(matrix), x, None).double() - wanted).norm()
    assert errors < (x.bfloat16().double() @ values(matrix).t() - wanted).norm()


def _with(place: int, value: float) -> Callable[[Tensor], None]:
    return lambda x: x.__setitem__((3, place), value)


@pytest.mark.parametrize("change", [_with(7, float("nan")), _with(0, float("inf")), _with(40, float("-inf"))])
def test_what_is_no_number_stays_in_its_row(change: Callable[[Tensor], None], kernel: IntegerKernel) -> None:
    packed, x = kernel.pack(matrix_of(8, (40, 100, 2**31), "middle")), torch.randn(9, 100)
    change(x)
    y = kernel.apply(packed, x, None)
    assert not bool(y[3].isfinite().any())
    assert bool(y[[0, 1, 2, 4, 5, 6, 7, 8]].isfinite().all())


def test_zeros_and_tiny_numbers_give_zeros(kernel: IntegerKernel) -> None:
    packed = kernel.pack(matrix_of(8, (40, 100, 2**31), "middle"))
    x = torch.zeros(2, 100)
    x[1] = 1e-40
    assert bool((kernel.apply(packed, x, None) == 0).all())


@pytest.mark.parametrize(
    ("bits", "columns", "group", "together"),
    [
        (8, 576, 2**31, 64),
        (8, 100, 2**31, 64),
        (4, 576, 32, 32),
        (4, 576, 64, 64),
        (4, 512, 128, 64),
        (6, 512, 16, 16),
        (4, 480, 96, None),
        (4, 480, 12, None),
        (8, 480, 12, 12),
        (8, 480, 6, None),
    ],
)
def test_groups_the_kernel_does(bits: int, columns: int, group: int, together: int | None) -> None:
    assert rounded_together(bits, columns, group) == together


@pytest.mark.parametrize("bits", [8, 6, 5, 4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_slices_of_rows_are_packed_as_the_whole(bits: int, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = IntegerKernel(ThreadPool(2))
    matrix = matrix_of(bits, (130, 512, 64), scheme)
    whole = kernel.pack(matrix)
    asked: list[tuple[int, int]] = []

    def rows(start: int, stop: int) -> Integers:
        asked.append((start, stop))
        return matrix.rows(start, stop)

    monkeypatch.setattr(integers, "PACKED_AT_ONCE", 33 * 512)
    sliced = kernel.pack_slices(130, 512, rows)
    assert asked == [(0, 32), (32, 64), (64, 96), (96, 128), (128, 130)]
    assert len(sliced.scales) == len(whole.scales)
    for mine, wanted in zip((sliced.words, *sliced.scales), (whole.words, *whole.scales), strict=True):
        assert torch.equal(mine, wanted)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(2))
    assert torch.equal(kernel.apply(sliced, x, None), kernel.apply(whole, x, None))
