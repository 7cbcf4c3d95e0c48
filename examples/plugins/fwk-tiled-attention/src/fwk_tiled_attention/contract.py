"""The contract: once with one tile for all keys of the suite, once with many small ones."""

from __future__ import annotations

from fwk.testing import AttentionSuite


class TestTiled(AttentionSuite):
    plugin = "tiled"


class TestSmallTiles(AttentionSuite):
    plugin = "tiled"
    options = {"tiled_keys": 7}
