"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

from typing import Any

from fwk.testing import LogitsProcessorSuite


class TestMine(LogitsProcessorSuite):
    plugin = "mine"
    served_request = {"prompt": "q" * 40, "max_tokens": 8, "mine_echo": 100.0}
    asks = ({"extra": {"mine_echo": 1.5}}, {"extra": {"mine_echo": -0.5}})

    def check_served(self, url: str, reply: Any) -> None:
        super().check_served(url, reply)
        assert reply["choices"][0]["text"] == "q" * 8
