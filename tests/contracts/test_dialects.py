"""Every HTTP dialect does what the contract says."""

from __future__ import annotations

import json

from fwk_kit.testing import DialectSuite
from fwk_kit.testing.asgi import Call, Reply

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


class TestOpenAI(DialectSuite):
    plugin = "openai"
    generates = (
        Call("POST", "/v1/chat/completions", CHAT),
        Call("POST", "/v1/completions", {"prompt": "Hi"}),
        Call("POST", "/v1/completions", {"prompt": "Hi", "n": 3}),
    )
    streams = (
        Call("POST", "/v1/chat/completions", {**CHAT, "stream": True}),
        Call("POST", "/v1/completions", {"prompt": "Hi", "stream": True}),
    )
    wrong = (Call("POST", "/v1/completions", {"prompt": "Hi", "max_tokens": -1}), Call("POST", "/v1/completions", {}))

    def text_of(self, call: Call, reply: Reply) -> str:
        if (call.body or {}).get("stream"):
            events = [line.removeprefix("data: ") for line in reply.body.decode().split("\n\n")]
            choices = [json.loads(event)["choices"][0] for event in events if event.startswith("{")]
        else:
            choices = [reply.json()["choices"][0]]
        return "".join(
            choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""
            for choice in choices
        )


class TestTGI(DialectSuite):
    plugin = "tgi"
    generates = (Call("POST", "/generate", {"inputs": "Hi"}), Call("POST", "/", {"inputs": "Hi"}))
    streams = (Call("POST", "/generate_stream", {"inputs": "Hi"}),)
    wrong = (Call("POST", "/generate", {"inputs": 3}), Call("POST", "/generate", {}))
