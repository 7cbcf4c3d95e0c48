"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

from typing import Any

from fwk.testing import PrefixCacheSuite, ask, metric


class TestMine(PrefixCacheSuite):
    plugin = "mine"
    served_request = {"prompt": "Hello " * 20, "max_tokens": 8}

    def check_served(self, url: str, reply: Any) -> None:
        super().check_served(url, reply)
        ask(url, self.served_path, dict(self.served_request))
        assert metric(url, "fwk:prefix_cache_hits_total") > 0
