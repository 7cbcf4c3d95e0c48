"""Checks 1 and 6: bodies that are no requests, and names that would be more than names."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.client import Streamed, connect, together
from tests.helpers.http import NO_TLS
from tests.helpers.rig import Server, assert_no_leak
from tests.helpers.wrong_requests import MALFORMED

GOOD = {"prompt": "Hi", "max_tokens": 1, "temperature": 0, "stop": ["x"], "logit_bias": {"65": 1.5}, "user": None}
TEXT = json.dumps(GOOD).encode()
CHAT = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}).encode()


def with_value(literal: bytes, name: str = "prompt") -> bytes:
    return b'{"%s": %s, "max_tokens": 1}' % (name.encode(), literal)


BAD: dict[str, bytes] = {
    **{f"cut after {i} bytes": TEXT[:i] for i in range(1, len(TEXT))},
    **MALFORMED,
    "blank": b"  \r\n\t ",
    "a key that is none": b"{1: 2}",
    "an integer of 10,000 digits": with_value(b"9" * 10_000, "seed"),
    "a fraction of 10,000 digits": with_value(b"0." + b"9" * 10_000 + b"e9999", "temperature"),
    "UTF-16 without a mark": TEXT.decode().encode("utf-16-le"),
    "past the last character": b'{"prompt": "\xf4\x90\x80\x80"}',
    "half an escape": b'{"prompt": "\\u00"}',
    "NUL": b"\0",
    "arrays 100,000 deep": with_value(b"[" * 100_000 + b"]" * 100_000),
    "objects 100,000 deep": with_value(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "arrays 129 deep": with_value(b"[" * 129 + b"]" * 129, "user"),
    "XML": b"<prompt>Hi</prompt>",
    "a pickle": b"\x80\x04\x95\x0f\0\0\0\0\0\0\0\x8c\x02os\x94\x8c\x06system\x94.",
    "a million commas": b"[" + b"," * 1_000_000,
    "a million keys": b"{" + b",".join(b'"%d":0' % i for i in range(100_000)) + b"}",
}


def check_error(status: int, body: Any) -> None:
    """OpenAI's shape, a 400, and nothing that is not for clients."""
    assert status == 400, (status, str(body)[:300])
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert 0 < len(error["message"]) < 1000


def test_there_are_enough() -> None:
    assert len(BAD) >= 120


async def test_a_corpus(fake: Server) -> None:
    async with connect(fake) as client:
        for body in BAD.values():  # what Python keeps of the largest of them, once
            await client.post(body)
        fake.settle()
        steps = fake.stats()["steps"]
        for path in ("/v1/completions", "/v1/chat/completions"):
            for name, body in BAD.items():
                status, reply = await client.post(body, path)
                try:
                    check_error(status, reply)
                except AssertionError as error:
                    raise AssertionError(f"{name} at {path}: {error}") from None
        _, reply = await client.post(BAD["arrays 129 deep"])
        assert "nested more than 128 levels" in reply["error"]["message"]
        assert fake.stats()["steps"] == steps, "something refused was computed"
        for whole, path in ((TEXT, "/v1/completions"), (CHAT, "/v1/chat/completions")):
            assert (await client.post(whole, path))[0] == 200
    fake.check_invariants()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
FIELDS = st.sampled_from([*GOOD, "n", "seed", "messages", "tools", "response_format", "stream_options", "echo"])


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(FIELDS, VALUES, max_size=6), st.integers(0, 200), st.binary(max_size=4))
def test_anything(fake: Server, fields: dict[str, Any], where: int, splice: bytes) -> None:
    """Fields of any type, and bytes anywhere in between: an answer of the right shape or a 400 of it."""
    body = json.dumps(GOOD | fields).encode()
    damaged = body[:where] + splice + body[where:]
    for path in ("/v1/completions", "/v1/chat/completions"):
        for content in (body, damaged):
            headers = {"content-type": "application/json"}
            reply = httpx.post(fake.url + path, content=content, headers=headers, timeout=30, verify=NO_TLS)
            assert_no_leak(reply.text)
            if reply.status_code != 200:
                check_error(reply.status_code, reply.json())


def test_nothing_is_left_of_it(fake: Server) -> None:
    fake.check_invariants()


EVIL = ["a\r\nx-evil: 1", "a\nERROR nothing is well", "a\0b", "\x1b[31mred", "\u2028", "x" * 2**20]


@pytest.mark.parametrize("field", ["request_id", "rid", "model", "lora_path", "user"])
async def test_names_stay_names(fake: Server, field: str) -> None:
    """In the body: refused, or taken for what they are; never a line of the log or a header of a reply."""
    async with connect(fake) as client:
        for value in EVIL:
            status, _ = await client.post(GOOD | {field: value})
            assert status == 200 if field == "user" else status in (400, 404), (field, value[:40], status)
    assert not [line for line in fake.log.splitlines() if line.startswith(("ERROR nothing", "x-evil"))]
    assert "\x1b" not in fake.log
    fake.check_invariants()


async def test_headers_stay_headers(fake: Server) -> None:
    """X-Request-Id: what is no plain word is replaced; a newline can only be sent as the end of the header."""
    host, port = fake.url.removeprefix("http://").split(":")
    for value in (b"a\tb", b"\xff\xfe", b"x" * 200, b"a b", b"\x7f"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-request-id: %s\r\n\r\n" % value
        )
        head, _, _ = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
        writer.close()
        assert head.lower().count(b"x-request-id") <= 1
        assert value not in head


async def test_one_name_for_many_in_flight(fake: Server) -> None:
    """The client's name of a request is a label: both are answered, each with its own text."""
    dice = random.Random(6)
    async with connect(fake) as client:
        prompts = [f"twin {dice.random()}" for _ in range(6)]
        alone = [await client.complete(prompt=prompt, max_tokens=40) for prompt in prompts]
        streams: list[Streamed] = await together(
            client.stream(prompt=prompt, max_tokens=40, request_id="twin") for prompt in prompts
        )
    assert [stream.token_ids[0] for stream in streams] == [ids for (ids,) in alone]
    fake.check_invariants()
