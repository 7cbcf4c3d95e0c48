"""What every attention backend must do."""

from fwk_tiled_attention.contract import TestSmallTiles, TestTiled

__all__ = ["TestSmallTiles", "TestTiled"]
