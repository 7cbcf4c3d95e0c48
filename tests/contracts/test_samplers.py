"""Every sampler does what the contract says."""

from __future__ import annotations

from fwk_kit.testing import SamplerSuite


class TestTorch(SamplerSuite):
    plugin = "torch"


class TestCpu(SamplerSuite):
    plugin = "cpu"
