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


OLLAMA_CHAT = {"model": "tiny", **CHAT}
OLLAMA_GENERATE = {"model": "tiny", "prompt": "Hi"}


class TestOllama(DialectSuite):
    plugin = "ollama"
    generates = (
        Call("POST", "/api/generate", {**OLLAMA_GENERATE, "stream": False}),
        Call("POST", "/api/generate", {**OLLAMA_GENERATE, "stream": False, "raw": True}),
        Call("POST", "/api/chat", {**OLLAMA_CHAT, "stream": False, "options": {"num_predict": -1, "seed": 3}}),
    )
    streams = (Call("POST", "/api/generate", OLLAMA_GENERATE), Call("POST", "/api/chat", OLLAMA_CHAT))
    wrong = (
        Call("POST", "/api/generate", {**OLLAMA_GENERATE, "images": ["x"]}),
        Call("POST", "/api/generate", {**OLLAMA_GENERATE, "suffix": "x"}),
        Call("POST", "/api/generate", {**OLLAMA_GENERATE, "options": {"num_gpu": 1}}),
        Call("POST", "/api/generate", {**OLLAMA_GENERATE, "options": {"temperature": -1}}),
        Call("POST", "/api/generate", {**OLLAMA_GENERATE, "options": {"typical_p": 0.5}}),
        Call("POST", "/api/generate", {**OLLAMA_GENERATE, "format": "json"}),
        Call("POST", "/api/chat", {**OLLAMA_CHAT, "model": "other"}),
        Call("POST", "/api/chat", {"messages": [{"role": "wizard", "content": "x"}]}),
    )

    def text_of(self, call: Call, reply: Reply) -> str:
        lines = [json.loads(line) for line in reply.body.decode().splitlines()]
        assert lines[-1]["done"] is True
        assert lines[-1]["eval_count"] > 0
        return "".join(line["message"]["content"] if "message" in line else line["response"] for line in lines)
