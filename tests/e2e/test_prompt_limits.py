"""``--long-truncation-mode``, ``--max-req-input-len`` and ``--stream-interval`` of a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.helpers.servers import Start

PROMPT = list(range(10, 110))


@pytest.fixture
def client(spawn: Start) -> Iterator[httpx.Client]:
    server = spawn("--max-req-input-len", "40", "--long-truncation-mode", "head", "--stream-interval", "5")
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.mark.sweep
def test_a_long_prompt_is_answered_as_its_end_and_streams_have_fewer_events(client: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    cut, end = (
        client.post("/v1/completions", json=body | {"prompt": prompt}).json() for prompt in (PROMPT, PROMPT[-40:])
    )
    assert cut["usage"]["prompt_tokens"] == end["usage"]["prompt_tokens"] == 40
    assert cut["choices"][0]["text"] == end["choices"][0]["text"]
    reply = client.post("/v1/completions", json=body | {"stream": True, "return_token_ids": True})
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    assert "".join(choice["text"] for choice in choices) == end["choices"][0]["text"]
    assert [len(choice["token_ids"]) for choice in choices] == [1, 5, 5, 1]
    text = "word " * 500
    assert client.post("/v1/completions", json={"prompt": text, "max_tokens": 1}).json()["usage"]["prompt_tokens"] == 40
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    assert client.post("/v1/chat/completions", json=chat).json()["usage"]["prompt_tokens"] == 40
