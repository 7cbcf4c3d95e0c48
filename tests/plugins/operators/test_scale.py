"""Scaling in place: what packed embeddings need of operators besides the contract."""

from __future__ import annotations

import pytest
import torch

import fwk_native as native
from fwk.interfaces.operators import OperatorContext
from fwk.plugins import discover, find, load_object
from fwk_native.thread_pool import ThreadPool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["torch", "cpu"])
def test_scale(name: str, dtype: torch.dtype) -> None:
    if name == "cpu" and native.refusal() is not None:
        pytest.skip("no C++ compiler")
    context = OperatorContext(torch.device("cpu"), dtype, threads=ThreadPool())
    operators = load_object(find(discover(), "operators", name))(context)
    for n, size in ((0, 5), (1, 1), (3, 16), (33, 577)):
        whole = torch.randn(n, size + 3, generator=torch.Generator().manual_seed(size)).to(dtype)
        wanted, rest = (whole[:, 1:-2].double() * 25.25).to(dtype), whole[:, [0, -2, -1]].clone()
        operators.scale(whole[:, 1:-2], 25.25)
        torch.testing.assert_close(whole[:, 1:-2], wanted)
        assert torch.equal(whole[:, [0, -2, -1]], rest)
