"""Checks 28 and 29: clients that hang up, at any moment, leave nothing behind in the engine."""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.client import connect, dial, raw_request, together
from tests.helpers.rig import FAKE, FAKE_CHUNK, Server, until, write_model
from tests.helpers.rude import LONG, Rude
from tests.helpers.servers import Start

NUM_CLIENTS = 500
AT_ONCE = 100
CONTEXT = 8192  # all of the K/V memory that these servers have


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model that continues for long."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def fake(spawn: Start) -> Server:
    """Not the one that others use: of that model, and with so many requests that each abort can be counted."""
    return spawn(*FAKE, "--chunked-prefill-size", str(FAKE_CHUNK), "--fake-step-ms", "2")


@pytest.fixture(scope="module")
def tiny(spawn: Start) -> Server:
    return spawn()


@pytest.fixture(scope="module", params=["fake", "tiny"])
def server(request: pytest.FixtureRequest) -> Server:
    return request.getfixturevalue(request.param)


@pytest.mark.sweep
async def test_a_storm_of_clients_that_hang_up(server: Server) -> None:
    dice = random.Random(28)
    seen: Counter[str] = Counter()
    gate = asyncio.Semaphore(AT_ONCE)
    before = server.stats()

    async def one(seed: int) -> None:
        async with gate:
            await Rude(server, random.Random(seed)).run(seen)

    async with connect(server) as client:
        storm = [one(dice.randrange(2**32)) for _ in range(NUM_CLIENTS)]
        polite = [client.complete(prompt="a polite client", max_tokens=40) for _ in range(3)]
        *_, first, second, third = await together([*storm, *polite])
    assert len(seen) == 6
    assert seen.total() == NUM_CLIENTS
    assert first == second == third
    server.check_invariants()
    after = server.stats()
    assert after["aborted"] - before["aborted"] > NUM_CLIENTS / 4
    assert after["finished"] - before["finished"] == 3 + 1, "somebody's request went on without them"


async def aborted(server: Server, work: Callable[[], Awaitable[None]], count: int) -> None:
    """``work`` must lead to just so many sequences aborted, and to none that continues."""
    before = server.stats()
    await work()
    until(lambda: server.stats()["aborted"] >= before["aborted"] + count, 10, f"{count} aborts")
    server.check_invariants()
    after = server.stats()
    assert after["aborted"] == before["aborted"] + count
    assert after["finished"] == before["finished"] + 1  # the golden request


async def send_and_hang_up(server: Server, body: dict[str, Any], seconds: float) -> None:
    _, writer = await dial(server)
    writer.write(b"".join(raw_request(body)))
    await writer.drain()
    await asyncio.sleep(seconds)
    writer.close()
    await writer.wait_closed()


@pytest.mark.gate(1)
@pytest.mark.parametrize("n", [1, 4])
async def test_aborted_in_chunked_prefill(fake: Server, n: int) -> None:
    """A prompt of 30 chunks: it hangs up in the middle of them."""
    body = {"prompt": str(n) * 30 * FAKE_CHUNK, "max_tokens": 10, "n": n, "stream": True, "fault": "sleep:9"}

    async def work() -> None:
        await send_and_hang_up(fake, body, 1.0)  # in the ninth step, which sleeps

    computed = fake.stats()["generation_tokens"]
    await aborted(fake, work, n)
    golden = len(fake.golden)
    assert fake.stats()["generation_tokens"] - computed == golden, "it was aborted too late to prove anything"


@pytest.mark.sweep
async def test_aborted_while_queued(fake: Server) -> None:
    async with connect(fake) as client:
        running = asyncio.ensure_future(client.complete(prompt="eight", n=8, max_tokens=500))
        await asyncio.to_thread(until, lambda: fake.stats()["num_running"] == 8, 10, "a full engine")
        before = fake.stats()["aborted"]
        for n in (1, 4):
            await send_and_hang_up(fake, {"prompt": "queued", "max_tokens": LONG, "n": n}, 0.1)
        await asyncio.to_thread(until, lambda: fake.stats()["aborted"] == before + 5, 10, "5 aborts")
        assert not running.done(), "nobody had to queue"
        assert len(set(map(tuple, await running))) == 1
    fake.check_invariants()


async def test_aborted_at_the_finish(fake: Server) -> None:
    """Hangs up on each of the last lines of a stream, before and behind its end."""
    body = {"prompt": "finish", "max_tokens": 6, "stream": True}
    async with connect(fake) as client:
        (expected,) = await client.complete(prompt="finish", max_tokens=6)

    async def one(num_lines: int) -> None:
        reader, writer = await dial(fake)
        writer.write(b"".join(raw_request(body)))
        for _ in range(num_lines):
            await asyncio.wait_for(reader.readline(), 10)
        writer.close()
        await writer.wait_closed()

    before = fake.stats()
    num_lines = list(range(24)) * 6
    await together(one(count) for count in num_lines)
    until(fake.is_idle, 10, "idle")
    after = fake.stats()
    ended = after["aborted"] + after["finished"] - before["aborted"] - before["finished"]
    assert len(num_lines) * 0.8 < ended <= len(num_lines), "each ends at most once"
    async with connect(fake) as client:
        assert await client.complete(prompt="finish", max_tokens=6) == [expected]
    fake.check_invariants()


@pytest.mark.sweep
async def test_aborted_twice(fake: Server) -> None:
    """By a stop string in one choice after the other, then by the client who hangs up on the rest."""
    async with connect(fake) as client:
        status, whole = await client.post({"prompt": "twice", "max_tokens": 60, "temperature": 0})
        assert status == 200
        text = whole["choices"][0]["text"]
        for position in (0, 1, 7, 30, 57):
            stop = text[position : position + 3]
            body = {"prompt": "twice", "max_tokens": 60, "n": 4, "stop": [stop], "temperature": 0}
            replies = await together([client.post(body) for _ in range(3)])
            for status, reply in replies:
                assert status == 200
                assert {choice["text"] for choice in reply["choices"]} == {text[: text.index(stop)]}
            streamed = [client.stream(prompt="twice", max_tokens=60, n=4, stop=[stop]) for _ in range(3)]
            for stream in await together(streamed):
                assert set(stream.texts.values()) == {text[: text.index(stop)]}
                assert stream.is_done
            body |= {"stream": True, "max_tokens": LONG, "stop": [stop, "no such text"]}
            await send_and_hang_up(fake, body, 0.005 * position)
    fake.check_invariants()


@pytest.mark.sweep
async def test_one_choice_ends_and_the_others_go_on(tiny: Server) -> None:
    """A stop string aborts one sequence of a request in the engine: its siblings must not notice."""
    body = {"prompt": "siblings", "max_tokens": 60, "n": 4, "temperature": 1.0, "seed": 9, "ignore_eos": True}
    async with connect(tiny) as client:
        status, whole = await client.post(body)
        assert status == 200
        texts = [choice["text"] for choice in whole["choices"]]
        assert len(set(texts)) == 4
        for text, position in zip(texts, (3, 10, 30, 50), strict=True):
            stop = text[position : position + 4]
            expected = [other.partition(stop)[0] for other in texts]
            status, reply = await client.post(body | {"stop": [stop]})
            assert [choice["text"] for choice in reply["choices"]] == expected
            stream = await client.stream(**body | {"stop": [stop]})
            assert [stream.texts.get(i, "") for i in range(4)] == expected
    tiny.check_invariants()


@pytest.mark.sweep
async def test_one_client_many_times(tiny: Server) -> None:
    """The same prompt over and over, given up a little later each time: the prefix cache keeps its books."""
    body = {"prompt": "again and again " * 20, "max_tokens": LONG, "stream": True}
    for i in range(40):
        await send_and_hang_up(tiny, body, 0.002 * i)
    tiny.check_invariants()


@pytest.mark.sweep
def test_storm_does_not_outlive_itself(spawn: Start) -> None:
    """A server under a storm ends when told to."""
    server = spawn()
    sockets = []
    for i in range(50):
        sockets.append(socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))))
        sockets[-1].sendall(b"".join(raw_request({"prompt": f"{i}", "max_tokens": LONG, "stream": True})))
    for connection in sockets[:25]:
        connection.close()
    code = server.stop()
    for connection in sockets[25:]:
        connection.close()
    assert code == 0
    assert not server.leftovers
