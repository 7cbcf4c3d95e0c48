"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

from typing import Any

from fwk.testing import GrammarBackendSuite


class TestMine(GrammarBackendSuite):
    plugin = "mine"
    served_request = {"prompt": "Hello", "max_tokens": 8, "structured_outputs": {"choice": ["yes", "no"]}}

    def check_served(self, url: str, reply: Any) -> None:
        super().check_served(url, reply)
        assert reply["choices"][0]["text"] in ("yes", "no")
