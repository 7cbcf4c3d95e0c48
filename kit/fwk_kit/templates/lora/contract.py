"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

from typing import Any

from fwk.testing import LoRABackendSuite, ask


class TestMine(LoRABackendSuite):
    plugin = "mine"
    served_request = {"model": "one", "prompt": "Hello", "max_tokens": 8, "temperature": 0}

    def check_served(self, url: str, reply: Any) -> None:
        """``one`` is an adapter that the suite makes."""
        super().check_served(url, reply)
        plain = ask(url, self.served_path, {**self.served_request, "model": ""})
        assert plain["choices"][0]["text"] != reply["choices"][0]["text"]
