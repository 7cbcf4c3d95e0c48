"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

from fwk.testing import LogitsProcessorSuite


class TestMine(LogitsProcessorSuite):
    plugin = "mine"
    asks = ({"extra": {"mine_echo": 1.5}}, {"extra": {"mine_echo": -0.5}})
