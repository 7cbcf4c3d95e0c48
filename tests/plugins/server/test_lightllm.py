"""LightLLM's ``/generate`` and ``/generate_stream``."""

from __future__ import annotations

import json
import re

import pytest

from fwk.interfaces.dialect import Dialect, DialectContext
from fwk.server.stream_interval import DeltaBuffer
from fwk.types import GrammarRequest
from fwk_server.tgi import TGIOptions
from fwk_server.tgi.dialect import TGIDialect

TEXT = "Grüße 0 🙂!"
LEN = len(TEXT.encode())


@pytest.fixture
def dialect(frontend) -> Dialect:
    return TGIDialect(DialectContext(frontend, TGIOptions(generate_api="lightllm")))


async def test_the_reply_is_lightllms(client, frontend):
    reply = (await client.post("/generate", json={"inputs": "Hi"})).json()
    expected = {"generated_text": [TEXT], "count_output_tokens": LEN, "finish_reason": "stop", "prompt_tokens": 3}
    assert reply == expected
    assert (frontend.items[-1].sampling.temperature, frontend.items[-1].sampling.max_tokens) == (0.0, None)
    parameters = {"do_sample": True, "max_new_tokens": 2, "stop_sequences": ["x"], "n": 2, "return_details": True}
    reply = (await client.post("/generate", json={"inputs": "Hi", "parameters": parameters})).json()
    assert (reply["count_output_tokens"], reply["finish_reason"]) == ([2, 2], ["length", "length"])
    assert [token["id"] for token in reply["tokens"][0]] == list(TEXT.encode()[:2])
    assert (frontend.items[-1].sampling.temperature, frontend.items[-1].sampling.stop) == (1.0, ["x"])


async def test_a_body_that_names_another_model_is_refused(client, frontend):
    for path in ("/generate", "/generate_stream"):
        assert (await client.post(path, json={"inputs": "Hi", "model": "nobody's"})).status_code == 404
    assert frontend.items == []


async def test_the_stream_is_lightllms(client):
    reply = await client.post("/generate_stream", json={"inputs": "Hi", "parameters": {}})
    *events, rest = reply.text.split("\n\n")
    frames = [json.loads(event.removeprefix("data:")) for event in events]
    assert rest == ""
    assert "".join(frame["token"]["text"] for frame in frames) == TEXT
    assert [frame["finished"] for frame in frames] == [False] * (LEN - 1) + [True]
    assert (frames[-1]["finish_reason"], frames[-1]["token"]["count_output_tokens"]) == ("stop", LEN)


async def test_a_stream_with_an_interval_has_every_token(client, frontend, monkeypatch):
    """Three tokens an event: those of whole characters have their own text, else the last has all."""
    whole = frontend.generate

    async def gathered(item):
        buffer = DeltaBuffer(3)
        async for deltas in whole(item):
            if ready := buffer.ready(deltas):
                yield ready

    monkeypatch.setattr(frontend, "generate", gathered)
    reply = await client.post("/generate_stream", json={"inputs": "Hi", "parameters": {}})
    frames = [json.loads(event.removeprefix("data:")) for event in reply.text.split("\n\n") if event]
    assert [frame["token"]["id"] for frame in frames][:LEN] == list(TEXT.encode())
    assert "".join(frame["token"]["text"] for frame in frames) == TEXT
    assert [frame["token"]["count_output_tokens"] for frame in frames][:LEN] == list(range(1, LEN + 1))
    assert [frame["finished"] for frame in frames] == [False] * (len(frames) - 1) + [True]


async def test_its_names_and_what_its_operator_prefers(client, frontend):
    frontend.grammar_kinds = frozenset({"regex"})
    frontend.preferred_sampling = frontend.default_sampling = {"temperature": 0.7, "max_tokens": 3}
    await client.post("/generate", json={"inputs": "Hi", "parameters": {"regular_constraint": "a+"}})
    sampling = frontend.items[-1].sampling
    assert (sampling.grammar, sampling.temperature, sampling.max_tokens) == (GrammarRequest("regex", "a+"), 0.7, 3)
    await client.post("/generate", json={"inputs": "Hi", "parameters": {"do_sample": False}})
    assert frontend.items[-1].sampling.temperature == 0


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "inputs is required"),
        ({"inputs": 3}, "inputs must be a string"),
        ({"inputs": "a", "parameters": {"max_new_token": 3}}, "did you mean max_new_tokens"),
        ({"inputs": "a", "parameters": {"do_sample": 3}}, "do_sample must be true or false"),
        ({"inputs": "a", "multimodal_params": {"images": [1]}}, "reads text only"),
    ],
)
async def test_wrong_bodies_are_refused(client, frontend, fields, sentence):
    reply = await client.post("/generate", json=fields)
    assert reply.status_code == 422
    assert re.search(sentence, reply.json()["error"])
    assert frontend.items == []
