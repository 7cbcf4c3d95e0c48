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
    wrong = (Call("POST", "/v1/completions", {"prompt": "Hi", "max_tokens": -2}), Call("POST", "/v1/completions", {}))

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


class TestLlamaCpp(DialectSuite):
    plugin = "llamacpp"
    generates = (Call("POST", "/completion", {"prompt": "Hi"}), Call("POST", "/completions", {"prompt": [72, "i"]}))
    streams = (Call("POST", "/completion", {"prompt": "Hi", "stream": True}),)
    wrong = (
        Call("POST", "/completion", {}),
        Call("POST", "/completion", {"prompt": "Hi", "n_predict": -3}),
        Call("POST", "/infill", {"input_prefix": "a", "input_suffix": "b"}),
    )


class TestResponses(DialectSuite):
    plugin = "openai-responses"
    generates = (
        Call("POST", "/v1/responses", {"input": "Hi"}),
        Call("POST", "/v1/responses", {"input": CHAT["messages"], "instructions": "Be kind.", "temperature": 0.0}),
    )
    streams = (Call("POST", "/v1/responses", {"input": "Hi", "stream": True}),)
    wrong = (
        Call("POST", "/v1/responses", {}),
        Call("POST", "/v1/responses", {"input": []}),
        Call("POST", "/v1/responses", {"input": "Hi", "tools": [{"type": "function"}]}),
    )

    def text_of(self, call: Call, reply: Reply) -> str:
        if not call.body.get("stream"):
            return "".join(part["text"] for item in json.loads(reply.body)["output"] for part in item["content"])
        events = [json.loads(line[6:]) for line in reply.body.decode().splitlines() if line.startswith("data: ")]
        assert [events[0]["type"], events[-1]["type"]] == ["response.created", "response.completed"]
        return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


OLLAMA_CHAT = {"model": "tiny", **CHAT}
OLLAMA_GENERATE = {"model": "tiny", "prompt": "Hi"}


ANTHROPIC = {"model": "tiny", "max_tokens": 8, **CHAT}


class TestAnthropic(DialectSuite):
    plugin = "anthropic"
    generates = (
        Call("POST", "/v1/messages", ANTHROPIC),
        Call(
            "POST", "/v1/messages", {**ANTHROPIC, "system": [{"type": "text", "text": "Be kind."}], "temperature": 0.0}
        ),
    )
    streams = (Call("POST", "/v1/messages", {**ANTHROPIC, "stream": True}),)
    wrong = (
        Call("POST", "/v1/messages", {"model": "tiny", **CHAT}),
        Call("POST", "/v1/messages", {**ANTHROPIC, "temperature": 2}),
        Call("POST", "/v1/messages", {**ANTHROPIC, "mcp_servers": [{"type": "url"}]}),
        Call("POST", "/v1/messages", {**ANTHROPIC, "model": "other"}),
        Call("POST", "/v1/messages", {**ANTHROPIC, "tools": [{"type": "web_search_20250305", "name": "w"}]}),
        Call("POST", "/v1/messages", {**ANTHROPIC, "messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    )

    def text_of(self, call: Call, reply: Reply) -> str:
        if not call.body.get("stream"):
            return "".join(block["text"] for block in json.loads(reply.body)["content"])
        events = [json.loads(line[6:]) for line in reply.body.decode().splitlines() if line.startswith("data: ")]
        assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        return "".join(delta["text"] for delta in deltas)


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
        Call("POST", "/api/generate", {**OLLAMA_GENERATE, "options": {"num_ctx": "long"}}),
        Call("POST", "/api/generate", {**OLLAMA_GENERATE, "options": {"temperature": -1}}),
        Call("POST", "/api/copy", {"source": "tiny", "destination": "other"}),
        Call("POST", "/api/create", {"model": "other", "from": "tiny"}),
        Call("POST", "/api/generate", {**OLLAMA_GENERATE, "format": "json"}),
        Call("POST", "/api/chat", {**OLLAMA_CHAT, "model": "other"}),
        Call("POST", "/api/chat", {"messages": [{"role": "wizard", "content": "x"}]}),
    )

    def text_of(self, call: Call, reply: Reply) -> str:
        lines = [json.loads(line) for line in reply.body.decode().splitlines()]
        assert lines[-1]["done"] is True
        assert lines[-1]["eval_count"] > 0
        return "".join(line["message"]["content"] if "message" in line else line["response"] for line in lines)
