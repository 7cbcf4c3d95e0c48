"""Every set of operators does what the contract says; those for CPUs with every instruction set of this machine."""

from __future__ import annotations

import pytest

from fwk import native
from fwk.testing import OperatorsSuite

SETTINGS = [(isa, 1) for isa in native.isas()] + [(native.isas()[-1], 3)]


class TestTorch(OperatorsSuite):
    plugin = "torch"


class TestCpu(OperatorsSuite):
    plugin = "cpu"

    @pytest.fixture(autouse=True, params=SETTINGS, ids=str)
    def setting(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        isa, self.num_threads = request.param
        monkeypatch.setenv(native.ISA_VARIABLE, isa)
