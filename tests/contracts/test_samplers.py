"""Every sampler does what the contract says."""

from __future__ import annotations

from fwk.testing import SamplerSuite


class TestTorch(SamplerSuite):
    plugin = "torch"


class TestCpu(SamplerSuite):
    plugin = "cpu"
