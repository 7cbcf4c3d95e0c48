"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

from typing import Any

from fwk.testing import ObserverSuite, ask


class TestMine(ObserverSuite):
    plugin = "mine"
    served_request = {"prompt": "Hello", "max_tokens": 8}

    def check_served(self, url: str, reply: Any) -> None:
        super().check_served(url, reply)
        assert ask(url, "/mine/stats") == {"requests": 1, "tokens": 8, "finished": 1}
