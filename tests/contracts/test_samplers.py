"""Every sampler does what the contract says."""

from __future__ import annotations

import pytest

from fwk.plugins import Registered
from fwk_kit.testing import SamplerSuite


class TestTorch(SamplerSuite):
    plugin = "torch"


class TestCpu(SamplerSuite):
    plugin = "cpu"


class TestTriton(SamplerSuite):
    """In Triton's interpreter."""

    plugin = "triton"
    num_picks = 2000

    @pytest.mark.sweep
    @pytest.mark.timeout(900)
    def test_picks_follow_the_distribution(self, item: Registered) -> None:
        super().test_picks_follow_the_distribution(item)

    @pytest.mark.sweep
    def test_what_was_truncated_is_never_picked(self, item: Registered) -> None:
        super().test_what_was_truncated_is_never_picked(item)

    @pytest.mark.sweep
    def test_seed_and_position_matter(self, item: Registered) -> None:
        super().test_seed_and_position_matter(item)
