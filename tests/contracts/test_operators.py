"""Every set of operators does what the contract says; those for CPUs with every instruction set of this machine."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from tests.helpers.isas import isa_params

import fwk_native as native
from fwk.plugins import Registered
from fwk_kit.testing import OperatorsSuite
from fwk_kit.testing.operators import DTYPES

SETTINGS = isa_params(f"{native.isas()[-1]}, 3 threads")


class TestTorch(OperatorsSuite):
    plugin = "torch"


@pytest.mark.gate(1)
class TestTriton(OperatorsSuite):
    """In Triton's interpreter."""

    plugin = "triton"
    num_rows_together = 30

    @pytest.mark.sweep
    def test_serves_a_tiny_model(self, item: Registered) -> None:
        super().test_serves_a_tiny_model(item)

    @pytest.mark.gate(2)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("rounds_last", [False, True])
    def test_add_rms_norm(self, item: Registered, dtype: torch.dtype, rounds_last: bool) -> None:
        """In bfloat16 too, which Triton rounds by itself."""
        super().test_add_rms_norm(item, dtype, rounds_last)

    @pytest.mark.sweep
    def test_a_row_depends_on_no_other(self, item: Registered) -> None:
        super().test_a_row_depends_on_no_other(item)


class TestCpu(OperatorsSuite):
    plugin = "cpu"

    @pytest.fixture(autouse=True, params=SETTINGS, ids=str)
    def setting(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        isa, _, threads = request.param.partition(", ")
        self.num_threads = 3 if threads else 1
        monkeypatch.setenv(native.ISA_VARIABLE, isa)


@pytest.mark.sweep
class TestInductor(OperatorsSuite):
    """Every size and layout is a kernel to compile, for seconds."""

    plugin = "inductor"
    options: ClassVar[dict[str, Any]] = {"torch_compile_max_bs": 256}  # all rows of the suite
    sizes = [17]
