"""Quantising while loading, apart from any layer."""

from __future__ import annotations

import pytest
import torch

from fwk_quant._common import integers
from fwk_quant._common.integers import quantise


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 13])
def test_a_large_matrix_is_quantised_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch, bits: int, has_zeros: bool, num_rows: int
) -> None:
    weight = torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    whole = quantise(weight, bits, 32, has_zeros=has_zeros)
    most: list[int] = []
    inner = integers._quantise
    monkeypatch.setattr(integers, "QUANTISED_AT_ONCE", 4 * 64)
    monkeypatch.setattr(integers, "_quantise", lambda some, *rest: most.append(len(some)) or inner(some, *rest))
    pieces = quantise(weight, bits, 32, has_zeros=has_zeros)
    assert most == {0: [0], 1: [1], 13: [4, 4, 4, 1]}[num_rows]
    assert pieces.keys() == whole.keys()
    assert all(torch.equal(pieces[name], whole[name]) for name in whole)
