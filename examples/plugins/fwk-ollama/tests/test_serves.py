"""A real server, asked as a client of Ollama asks."""

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from fwk.testing import ask, serve_tiny


def lines(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of a stream."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.headers["content-type"].startswith("application/x-ndjson")
        return [json.loads(line) for line in reply]


def test_generate_and_chat() -> None:
    with serve_tiny() as url:
        greedy = {"num_predict": 8, "temperature": 0, "repeat_penalty": 1.0}
        body = {"model": "any", "prompt": "Hello", "options": greedy}
        streamed = lines(url, "/api/generate", body)
        whole = ask(url, "/api/generate", {**body, "stream": False})
        assert "".join(each["response"] for each in streamed) == whole["response"]
        assert [each["done"] for each in streamed] == [False] * (len(streamed) - 1) + [True]
        assert streamed[-1]["eval_count"] == whole["eval_count"] <= 8
        chat = {"model": "any", "messages": [{"role": "user", "content": "Hello"}], "options": greedy}
        last = lines(url, "/api/chat", chat)[-1]
        assert last["message"]["role"] == "assistant"
        assert last["done_reason"] in ("stop", "length")
        assert len(ask(url, "/api/tags")["models"]) == 1
        with pytest.raises(urllib.error.HTTPError) as caught:
            ask(url, "/api/generate", {"model": "any", "prompt": "x", "suffix": "y"})
        assert caught.value.code == 400
        assert "suffix" in json.load(caught.value)["error"]
