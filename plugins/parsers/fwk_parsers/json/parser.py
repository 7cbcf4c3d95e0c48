"""The format itself is shared with models that write plain JSON by training."""

from __future__ import annotations

from fwk_parsers._common.bare import BareCalls


class JsonParser(BareCalls):
    """Plain JSON calls."""
