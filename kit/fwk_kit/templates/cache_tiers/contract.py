"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

from typing import Any

from fwk.testing import CacheTierSuite, ask, metric


class TestMine(CacheTierSuite):
    plugin = "mine"
    served_request = {"prompt": "0" * 450, "max_tokens": 8}

    def check_served(self, url: str, reply: Any) -> None:
        super().check_served(url, reply)
        for letter in "1234567":  # more than the device holds
            ask(url, self.served_path, {"prompt": letter * 450, "max_tokens": 8})
        ask(url, self.served_path, dict(self.served_request))
        assert metric(url, "fwk:prefix_cache_restored_total") > 0
