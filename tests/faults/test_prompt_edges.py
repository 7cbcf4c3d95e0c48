"""Check 5: prompts of no and of too much length; what is refused is never computed, and the loop stays awake."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from tests.helpers.client import HealthProbe, connect, dial, raw_request, together
from tests.helpers.rig import CONTEXT, Server

MAX_LAG = 1.0
MEGABYTE = 2**20


@pytest.mark.sweep
async def test_spaces_are_a_prompt(tiny: Server) -> None:
    async with connect(tiny) as client:
        for prompt in (" ", "   ", "\n", "\t\n", "\u3000", "\0"):
            assert len((await client.complete(prompt=prompt, max_tokens=2, ignore_eos=True))[0]) == 2


@pytest.mark.parametrize("as_ids", [True, False])
async def test_lengths_around_the_limit(tiny: Server, as_ids: bool) -> None:
    def prompt(length: int) -> Any:
        return [65] * length if as_ids else "A" * length

    longest = CONTEXT - 1  # one token must be able to follow
    async with connect(tiny) as client:
        for length in (longest - 1, longest):
            assert len((await client.complete(prompt=prompt(length), max_tokens=1))[0]) == 1
        computed = tiny.stats()["prompt_tokens"]
        for length in (longest + 1, longest + 2, 10 * longest):
            error = await client.refused({"prompt": prompt(length), "max_tokens": 1})
            assert error["param"] == "prompt"
        error = await client.refused({"prompt": prompt(longest), "max_tokens": 2})
        assert error["param"] == "max_tokens"
        error = await client.refused({"prompt": ["short", "A" * CONTEXT], "max_tokens": 1})
        assert error["param"] == "prompt[1]"
        messages = [{"role": "user", "content": "A" * CONTEXT}]
        await client.refused({"messages": messages}, "/v1/chat/completions")
    tiny.check_invariants()
    after = tiny.stats()["prompt_tokens"] - computed
    assert after == len("The golden request: "), "part of a refused prompt was computed"


async def test_megabytes_leave_the_loop_awake(tiny: Server) -> None:
    text = "word " * (8 * MEGABYTE // 5)
    quarter = text[: len(text) // 4]
    user = {"role": "user", "content": "Hi"}
    bodies = [
        ("/v1/completions", {"prompt": text, "max_tokens": 1}),
        ("/v1/completions", {"prompt": [65] * (2 * MEGABYTE), "max_tokens": 1}),
        ("/v1/completions", {"prompt": [quarter[: MEGABYTE // 8]] * 16, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 1, "stop": [text]}),
        ("/v1/chat/completions", {"messages": [user | {"content": quarter}]}),
        ("/v1/chat/completions", {"messages": [user] * 20_000}),
    ]
    async with connect(tiny) as client:
        for path, body in bodies:
            tiny.loop_times()
            with HealthProbe(tiny) as probe:
                error = await client.refused(body, path)
            assert ("at least" in error["message"]) == ("word" in str(body.get("prompt", body.get("messages")))[:60])
            assert tiny.loop_times()["busy"] < MAX_LAG, (path, str(body)[:80])
            assert probe.statuses <= {200}
        with HealthProbe(tiny):
            both = client.refused({"prompt": quarter}), client.post({"prompt": quarter}, "/tokenize")
            _, (status, reply) = await together(both)
        assert (status, reply["count"]) == (200, len(quarter))
        assert tiny.loop_times()["busy"] < MAX_LAG
    tiny.check_invariants()


@pytest.mark.parametrize("length", [64 * MEGABYTE + 1, 2**40])
async def test_a_body_past_the_limit_is_not_read(tiny: Server, length: int) -> None:
    reader, writer = await dial(tiny)
    head, _ = raw_request({}, length=length)
    writer.write(head)
    reply = await asyncio.wait_for(reader.read(), 10)  # until the server hangs up
    assert reply.startswith(b"HTTP/1.1 413")
    assert b'"error"' in reply
    writer.close()
    await writer.wait_closed()


@pytest.mark.sweep
async def test_who_sends_all_of_a_body_past_the_limit_is_told(fake: Server) -> None:
    """Were the connection closed over what is still on its way, it would be reset, and the reply lost."""
    async with connect(fake) as client:
        for _ in range(5):
            status, reply = await client.post(b" " * 32 * MEGABYTE)
            assert (status, "larger than" in reply["error"]["message"]) == (413, True)
    fake.check_invariants()


async def test_a_body_of_no_length_past_the_limit(fake: Server) -> None:
    reader, writer = await dial(fake)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
    writer.write(b"transfer-encoding: chunked\r\n\r\n")
    with contextlib.suppress(ConnectionError):  # the server may have hung up already
        for _ in range(9):
            writer.write(b"100000\r\n" + b" " * MEGABYTE + b"\r\n")
            await writer.drain()
        assert (await asyncio.wait_for(reader.readline(), 10)).startswith(b"HTTP/1.1 413")
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    fake.check_invariants()
