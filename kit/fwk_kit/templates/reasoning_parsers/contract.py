"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

from fwk.testing import ReasoningParserSuite


class TestMine(ReasoningParserSuite):
    plugin = "mine"
    samples = {
        "<mine>hm</mine>Yes.": ("Yes.", "hm", []),
        "Yes.": ("Yes.", "", []),
        "<mine>no end": ("", "no end", []),
    }
