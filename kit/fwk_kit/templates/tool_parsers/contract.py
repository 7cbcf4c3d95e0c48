"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

from fwk.testing import ToolParserSuite


class TestMine(ToolParserSuite):
    plugin = "mine"
    samples = {
        '<call>add {"a": 1}</call>': ("", "", [("add", '{"a": 1}')]),
        'Well: <call>add {"a": [2]}</call><call>say</call>.': ("Well: .", "", [("add", '{"a": [2]}'), ("say", "{}")]),
    }
