"""Panels and integers made by native operators, against torch, bit for bit."""

from __future__ import annotations

import pytest
import torch

import fwk_native as native
from fwk_native.thread_pool import ThreadPool
from fwk_quant._common.integers import MIDDLE, quantise
from fwk_quant._linear_cpu.packing import PANEL, Packing

pytestmark = pytest.mark.skipif(native.refusal() is not None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def packing() -> Packing:
    return Packing(ThreadPool(2))


@pytest.mark.parametrize("dtype", [torch.int32, torch.float16, torch.uint8])
@pytest.mark.parametrize("size", [(1, 1), (31, 17), (32, 16), (65, 100)])
def test_panels(packing: Packing, dtype: torch.dtype, size: tuple[int, int]) -> None:
    entries = torch.randint(1, 250, (size[1], size[0]), generator=torch.Generator().manual_seed(1)).to(dtype).t()
    found = packing.entries(entries)
    rows = found.transpose(1, 2).flatten(0, 1)
    assert found.shape == (-(-size[0] // PANEL), size[1], PANEL)
    assert torch.equal(rows[: size[0]], entries)
    assert not rows[size[0] :].any()


def test_rows_are_filled_up_with_zeros(packing: Packing) -> None:
    weight = torch.ones(3, 5, dtype=torch.uint8)
    rows = packing.words(weight, 8).transpose(1, 2).flatten(0, 1).contiguous().view(torch.uint8)
    assert rows[:3].tolist() == [[1] * 5 + [0] * 3] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("bits", "has_zeros"), [(8, False), (4, False), (4, True)])
@pytest.mark.parametrize(("rows", "columns", "group"), [(1, 8, 8), (19, 96, 32), (40, 77, 77)])
def test_integers(
    packing: Packing, dtype: torch.dtype, bits: int, has_zeros: bool, rows: int, columns: int, group: int
) -> None:
    numbers = torch.randn(rows, columns, generator=torch.Generator().manual_seed(bits))
    weight = (numbers * torch.logspace(-6, 3, rows).unsqueeze(1)).to(dtype)
    weight[0, :group] = 0
    weight[rows // 2] = weight[rows // 2].abs()  # nothing below zero: the levels still begin there
    weight[rows // 3, 0] = 127
    weight[rows // 3, 1:6] = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5])  # halves go to the even neighbour
    expected = quantise(weight, bits, group, has_zeros=has_zeros)
    found = packing.quantise(weight, bits, group, None if has_zeros else MIDDLE if bits == 4 else 0)
    assert {name: x.dtype for name, x in found.items()} == {name: x.dtype for name, x in expected.items()}
    assert all(torch.equal(found[name], expected[name]) for name in expected)
