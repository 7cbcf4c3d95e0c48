"""Rounding to NVFP4 while loading, where random numbers do not come."""

from __future__ import annotations

import pytest
import torch

from fwk_quant.fp4.numbers import Fp4Matrix, rounded


def values(weight: torch.Tensor) -> torch.Tensor:
    made = rounded(weight)
    factors = made["weight_scale_2"].expand(weight.shape[0])
    return Fp4Matrix(made["weight"], made["weight_scale"], factors).dense(0, weight.shape[0], torch.float32)


def test_the_middle_goes_to_the_even_number() -> None:
    """With 6 as the largest, a step is 1."""
    middle = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]])
    weight = torch.cat([middle, -middle], 1)
    found = torch.tensor([[0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]])
    assert torch.equal(values(weight), torch.cat([found, -found], 1))


def test_blocks_too_small_for_a_scale_become_zero() -> None:
    """The least scale of e4m3 is 2 ** -9, where the largest is 448; below half of it there is none but 0."""
    weight = torch.zeros(2, 32)
    weight[0, 0] = 6.0
    weight[0, 16:] = 6.0 / 448 * 2**-9 * torch.tensor([1.0, 0.4]).repeat(8)
    weight[1, :16] = 1e-9
    found = values(weight)
    torch.testing.assert_close(found[0, 16::2], weight[0, 16::2])
    assert not found[1].any()
    assert not values(torch.zeros(1, 16)).any()


@pytest.mark.parametrize(("exponent", "dtype"), [(104, torch.float16), (103, torch.float32), (143, torch.float32)])
def test_powers_of_two_take_16_bits_where_they_are_float16s(exponent: int, dtype: torch.dtype) -> None:
    scales = torch.tensor([[exponent], [127]], dtype=torch.uint8)
    matrix = Fp4Matrix(torch.full((2, 16), 0x77, dtype=torch.uint8), scales, torch.ones(2))
    found = matrix.for_kernel()(0, 2)
    assert isinstance(found.scales, torch.Tensor)
    assert found.scales.dtype == dtype
    assert (found.numbers.int() - 12).mul(found.scales.double())[:, 0].tolist() == [6 * 2.0 ** (exponent - 127), 6.0]
