"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

from typing import Any

from fwk.testing import ToolParserSuite


class TestMine(ToolParserSuite):
    plugin = "mine"
    served_path = "/v1/chat/completions"
    served_request = {
        "messages": [{"role": "user", "content": "Add."}],
        "max_tokens": 60,
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
        "tool_choice": "required",
    }

    def check_served(self, url: str, reply: Any) -> None:
        super().check_served(url, reply)
        choice = reply["choices"][0]
        if choice["finish_reason"] != "length":  # the model is random, and may not end its call
            assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["add"]
            assert not choice["message"]["content"]

    samples = {
        '<call>add {"a": 1}</call>': ("", "", [("add", '{"a": 1}')]),
        'Well: <call>add {"a": [2]}</call><call>say</call>.': ("Well: .", "", [("add", '{"a": [2]}'), ("say", "{}")]),
    }
