"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fwk.testing import FeatureSuite, ask


class TestMine(FeatureSuite):
    plugin = "mine"
    request: ClassVar[Mapping[str, Any]] = {"mine_entropy": True}
    served_request = {"prompt": "Hello", "max_tokens": 8, "mine_entropy": True}

    def check_served(self, url: str, reply: Any) -> None:
        super().check_served(url, reply)
        assert all(nats > 0 for nats in reply["choices"][0]["features"]["mine"]["mean_nats"])
        assert ask(url, "/mine/entropy")["choices"] == 8
