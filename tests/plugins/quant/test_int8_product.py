"""Products of int8 on processors whose own saturate."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tests.helpers.int8 import exact, int_mm, saturating

from fwk_quant._common.int8_product import multiply_int8, saturates


@pytest.mark.parametrize(("tokens", "columns", "rows"), [(1, 8, 3), (5, 1025, 1100), (2, 4999, 8)])
def test_products_are_exact(tokens: int, columns: int, rows: int) -> None:
    """Beyond 1024 products, too, where float32 no longer holds each sum; a chunk of the weight at a time."""
    drawn = torch.Generator().manual_seed(columns)
    x = torch.randint(-128, 128, (tokens, columns), dtype=torch.int8, generator=drawn)
    weight = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=drawn)
    x[0], weight[0] = -127, 127
    assert torch.equal(multiply_int8(x, weight), exact(x, weight.t()))


def test_a_product_that_saturates_is_noticed() -> None:
    with int_mm(exact):
        assert not saturates()
    with int_mm(saturating):
        assert saturates()
    with int_mm(lambda x, weight: exact(x, weight) if x.dtype == torch.int8 else saturating(x, weight)):
        assert saturates(), "torchao shifts to uint8 itself on some processors"
    with int_mm(lambda x, weight: exact(x, weight) if len(x) > 1 else saturating(x, weight)):
        assert saturates(), "one token may have a kernel of its own"


@pytest.mark.sweep
@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE", "ALL"])
def test_what_is_noticed_is_what_onednn_does(isa: str) -> None:
    """In a process of its own, as oneDNN reads the variable once."""
    code = """
import torch
from fwk_quant._common.int8_product import saturates
drawn = torch.Generator().manual_seed(1)
x = torch.randint(-128, 128, (9, 192), dtype=torch.int8, generator=drawn)
weight = torch.randint(-128, 128, (192, 40), dtype=torch.int8, generator=drawn)
assert saturates() != torch.equal(torch._int_mm(x, weight), (x.double() @ weight.double()).int())
"""
    subprocess.run([sys.executable, "-c", code], env={"ONEDNN_MAX_CPU_ISA": isa}, check=True, timeout=120)
