"""The contract of dialects, with Ollama's requests."""

from __future__ import annotations

import json

from fwk.testing import Call, DialectSuite, Reply

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
GENERATE = {"model": "tiny", "prompt": "Hi"}


class TestOllama(DialectSuite):
    plugin = "ollama"
    generates = (
        Call("POST", "/api/generate", {**GENERATE, "stream": False}),
        Call("POST", "/api/generate", {**GENERATE, "stream": False, "raw": True, "options": {"temperature": 0}}),
        Call("POST", "/api/chat", {**CHAT, "stream": False, "options": {"num_predict": -1, "seed": 3, "stop": "x"}}),
    )
    streams = (Call("POST", "/api/generate", GENERATE), Call("POST", "/api/chat", CHAT))
    wrong = (
        Call("POST", "/api/generate", {**GENERATE, "images": ["x"]}),
        Call("POST", "/api/generate", {"model": "tiny"}),
        Call("POST", "/api/generate", {**GENERATE, "options": {"num_gpu": 1}}),
        Call("POST", "/api/generate", {**GENERATE, "options": {"temperature": -1}}),
        Call("POST", "/api/generate", {**GENERATE, "format": "json"}),
        Call("POST", "/api/chat", {"model": "tiny", "messages": []}),
        Call("POST", "/api/chat", {"model": "tiny", "messages": [{"role": "wizard", "content": "x"}]}),
    )

    def text_of(self, call: Call, reply: Reply) -> str:
        lines = [json.loads(line) for line in reply.body.decode().splitlines()]
        assert lines[-1]["done"] is True
        assert lines[-1]["eval_count"] > 0
        return "".join(line["message"]["content"] if "message" in line else line["response"] for line in lines)
