"""The Triton operators' declaration and machine code; their numbers: tests/contracts."""

from __future__ import annotations

import os

import pytest
import torch
from tests.helpers.interpreted import check_never_chosen_by_itself
from tests.helpers.machine_code import compiled

from fwk.interfaces.operators import OperatorContext
from fwk.plugins import build, discover, find

PLUGINS = discover()
TRITON = find(PLUGINS, "operators", "triton")


def test_never_chosen_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    check_never_chosen_by_itself(PLUGINS, "operators", monkeypatch)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter")
def test_a_residual_whose_rows_stand_apart() -> None:
    operators = build(TRITON, OperatorContext(torch.device("cpu"), torch.float32))
    wide = torch.randn(3, 20)
    residual, x, weight = wide[:, :16], torch.randn(3, 16), torch.rand(16)
    total = residual + x
    found = operators.add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(found, total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight)
    torch.testing.assert_close(residual, total)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("cc", [80, 90, 100])
def test_machine_code(cc: int, dtype: str) -> None:
    """No numbers in local memory, and memory read 128 bits at a time."""
    found = compiled(str(cc), dtype, "operators")
    assert {code["name"] for code in found} == {"norm_rows", "rotate_rows", "gate_rows", "table_rows"}
    for code in found:
        assert code["local_loads"] == code["local_stores"] == 0, code
        # Where a row of a table begins is known only when its index was read.
        assert code["loads_of_128_bits"] > 0 or code["name"] == "table_rows", code
