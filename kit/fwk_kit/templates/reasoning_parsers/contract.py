"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

from typing import Any

from fwk.testing import ReasoningParserSuite


class TestMine(ReasoningParserSuite):
    plugin = "mine"
    served_path = "/v1/chat/completions"
    served_request = {
        "messages": [{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": "<mine>"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "max_tokens": 8,
    }

    def check_served(self, url: str, reply: Any) -> None:
        """What the model goes on to think is no answer."""
        super().check_served(url, reply)
        message = reply["choices"][0]["message"]
        assert message["reasoning_content"]
        assert not message["content"]

    samples = {
        "<mine>hm</mine>Yes.": ("Yes.", "hm", []),
        "Yes.": ("Yes.", "", []),
        "<mine>no end": ("", "no end", []),
    }
