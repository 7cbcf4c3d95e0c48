"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

from typing import Any

from fwk.testing import SpeculativeDecoderSuite, metric


class TestMine(SpeculativeDecoderSuite):
    plugin = "mine"
    served_request = {"prompt": "ha ha ha", "max_tokens": 32, "temperature": 0}

    def check_served(self, url: str, reply: Any) -> None:
        super().check_served(url, reply)
        assert metric(url, "fwk:num_draft_tokens_total") > 0
