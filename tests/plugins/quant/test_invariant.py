"""Triton's products of deterministic runs: right, and to the bit the same for a row in any batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.interpreted import interpreted
from tests.helpers.machine_code import compiled

from fwk.interfaces.declaration import Facts, Host
from fwk.plugins import discover, find
from fwk_quant.none import invariant
from fwk_quant.none.invariant import linear

TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.float16: (2**-10, 1e-3), torch.bfloat16: (2**-8, 1e-3)}
"""Relative and absolute: sums are made in float32, and rounded once."""


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.gate(4)
@interpreted
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 65])
def test_equals_a_product_in_float64(dtype: torch.dtype, num_rows: int) -> None:
    """With a bias and without; rows of a wider tensor, and sizes that fill no tile."""
    weight, bias = random(90, 145, dtype=dtype, seed=1), random(90, dtype=dtype, seed=2)
    x = random(num_rows, 300, dtype=dtype)[:, 100:245]
    for given in (None, bias):
        found = linear(x, weight, given)
        assert (found.dtype, found.shape) == (dtype, (num_rows, 90))
        wanted = F.linear(x.double(), weight.double(), None if given is None else given.double())
        relative, absolute = TOLERANCE[dtype]
        torch.testing.assert_close(found.double(), wanted, rtol=relative, atol=absolute)


def rows_differ(dtype: torch.dtype = torch.float32) -> bool:
    """Whether any of some rows has other bits alone, at another place, or among fewer others."""
    x, weight = random(300, 320, dtype=dtype), random(70, 320, dtype=dtype, seed=1)
    together = linear(x, weight, None)
    found = [torch.equal(linear(x[row : row + 1], weight, None), together[row : row + 1]) for row in (0, 77, 299)]
    found += [
        torch.equal(linear(x[first:last], weight, None), together[first:last]) for first, last in ((5, 22), (33, 298))
    ]
    found.append(torch.equal(linear(x.flip(0), weight, None), together.flip(0)))
    return not all(found)


@pytest.mark.gate(1)
@interpreted
@pytest.mark.usefixtures("same_rows")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_row_depends_on_no_other(dtype: torch.dtype) -> None:
    assert not rows_differ(dtype)


@pytest.mark.sweep
@interpreted
@pytest.mark.usefixtures("same_rows")
def test_a_sum_cut_by_the_number_of_rows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many inputs at once as keep a device busy."""
    real = invariant._launch

    def by_rows(kernel: object, grid: tuple[int, int], *arguments: object, **constants: object) -> None:
        real(kernel, grid, *arguments, **constants | {"STEP": 16 if grid[1] == 1 else 64})

    monkeypatch.setattr(invariant, "_launch", by_rows)
    assert rows_differ()


@interpreted
def test_one_kernel_for_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the interpreter cannot show: on a device tiles of two sizes add up otherwise."""
    seen: set[tuple[object, ...]] = set()
    real = invariant._launch

    def watched(kernel: object, grid: tuple[int, int], *arguments: object, **constants: object) -> None:
        seen.add(tuple(constants.items()))
        real(kernel, grid, *arguments, **constants)

    monkeypatch.setattr(invariant, "_launch", watched)
    assert not rows_differ(torch.bfloat16)
    assert len(seen) == 1


def test_where_there_is_no_kernel_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = find(discover(), "quant", "none").declaration.refusal
    on = {"layouts": ("plain",), "is_deterministic": True}
    assert refusal(Facts(Host("cuda", (9, 0)), "float16", **on)) is None  # type: ignore[arg-type]
    old = refusal(Facts(Host("cuda", (7, 5)), **on)) or ""  # type: ignore[arg-type]
    assert "by a Triton kernel, which needs compute capability 8.0" in old
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    other = refusal(Facts(Host("xpu"), **on)) or ""  # type: ignore[arg-type]
    assert "which needs a cuda device, or TRITON_INTERPRET=1" in other
    assert refusal(Facts(Host("xpu"), layouts=("plain",))) is None


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("target", ["80", "90", "100", "gfx942"])
def test_machine_code(target: str, dtype: str) -> None:
    """No numbers in local memory, memory read 128 bits at a time, products by tensor cores, room for two programs."""
    found = compiled(target, dtype, "products")
    assert [code["name"] for code in found] == ["linear_tiles"] * 2
    for code in found:
        assert code["local_loads"] == code["local_stores"] == 0, code
        assert code["loads_of_128_bits"] > 0, code
        assert code["matrix_products"] > 0 or dtype == "fp32", code  # float32 is multiplied as it is
        assert code["hopper_matrix_products"] > 0 or target != "90" or dtype == "fp32", code
        assert code["shared"] <= (64 if target == "gfx942" else 81) * 1024, code
