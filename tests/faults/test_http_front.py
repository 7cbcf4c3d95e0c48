"""What HTTP allows a client to do that no framework's example does: upgrades, half-closed connections, other names."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from itertools import product

import pytest

from tests.helpers.client import answer, dial, raw_request
from tests.helpers.rig import FAKE, Server, until
from tests.helpers.servers import Start

pytestmark = pytest.mark.usefixtures("as_before")

READ_SECONDS = 2.0
NUM_CLIENTS = 40
BODY = {"prompt": "Hi", "max_tokens": 1, "temperature": 0}
HEAD, DATA = raw_request(BODY)
PROTOCOLS = (b"h2c", b"websocket", b"TLS/1.0")
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
LAST = HEAD.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n") + DATA
NOISE = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def server(spawn: Start) -> Server:
    return spawn(*FAKE, "--read-timeout", str(READ_SECONDS), "--max-body-bytes", "65536")


def with_headers(*headers: bytes, data: bytes = DATA) -> bytes:
    return HEAD.replace(b"\r\n\r\n", b"\r\n" + b"\r\n".join(headers) + b"\r\n\r\n") + data


def statuses(reply: bytes) -> list[int]:
    return [int(part[:3]) for part in reply.split(b"HTTP/1.1 ")[1:]]


async def goes_on_sending(server: Server, head: bytes, more: bytes) -> bytes:
    """The reply that a client gets that sends as fast as it can, and reads only when it has heard nothing for long.

    It waits for the reply to arrive, sends more (which a closed socket answers with a reset that discards what was
    not read), and only then reads.
    """
    reader, writer = await dial(server)
    transport = writer.transport
    transport.pause_reading()
    writer.write(head)
    end = time.monotonic() + 0.5
    with contextlib.suppress(ConnectionError):
        while time.monotonic() < end and not transport.is_closing():
            writer.write(more)
            await asyncio.wait_for(writer.drain(), 20)
            await asyncio.sleep(0.02)
    if not transport.is_closing():
        transport.resume_reading()
    reply = b""
    with contextlib.suppress(ConnectionError):
        reply = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return reply


LINE = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
REFUSED = {
    431: (LINE, b"".join(b"x-%d: y\r\n" % i for i in range(800))),  # past the limit after some writes
    400: (LINE + b"no colon\r\n\r\n", b"x" * 4096),
    413: (HEAD.replace(b"content-length: ", b"content-length: 1000"), b"x" * 4096),
    501: (
        with_headers(b"transfer-encoding: gzip, chunked", data=b"").replace(b"content-length", b"x-length"),
        b"x" * 99,
    ),
}


@pytest.mark.parametrize("expected", REFUSED)
async def test_a_refusal_reaches_clients_that_go_on_sending(server: Server, expected: int) -> None:
    """Closed over unread bytes, a connection is reset, and the reset eats the reply."""
    head, more = REFUSED[expected]
    replies = await asyncio.gather(*(goes_on_sending(server, head, more) for _ in range(NUM_CLIENTS)))
    assert [statuses(reply) for reply in replies] == [[expected]] * NUM_CLIENTS
    assert all(b"connection: close" in reply for reply in replies)


async def test_a_timeout_reaches_clients_that_go_on_sending(server: Server) -> None:
    async def slow() -> bytes:
        reader, writer = await dial(server)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(HEAD.replace(b"content-length: ", b"content-length: 100"))
        with contextlib.suppress(ConnectionError):
            for _ in range(int((READ_SECONDS + 0.5) / 0.05)):
                writer.write(b" ")
                await asyncio.sleep(0.05)
        if not writer.transport.is_closing():
            writer.transport.resume_reading()  # type: ignore[attr-defined]
        reply = b""
        with contextlib.suppress(ConnectionError):
            reply = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        return reply

    replies = await asyncio.gather(*(slow() for _ in range(NUM_CLIENTS)))
    assert [statuses(reply) for reply in replies] == [[408]] * NUM_CLIENTS


@pytest.mark.sweep
async def test_nobody_lingers_for_ever(server: Server) -> None:
    """A client that never stops is hung up on."""
    reader, writer = await dial(server)
    writer.write(LINE + b"no colon\r\n\r\n")
    started = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while time.monotonic() - started < 10:
            writer.write(b"x" * 1000)
            await writer.drain()
            await asyncio.sleep(0.02)
    assert time.monotonic() - started < 5
    with contextlib.suppress(ConnectionError):
        await reader.read()
    writer.close()


async def test_an_upgrade_is_ignored(server: Server) -> None:
    """The request is served with its body, and what follows on the connection is the next request."""
    heads = [HEAD.replace(b"\r\n\r\n", b"\r\n" + H2C.replace(b"h2c", x) + b"\r\n") for x in PROTOCOLS]
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(DATA), DATA)
    wanted = json.loads(server.post(BODY).text)["choices"][0]["text"]
    for head, is_whole in product(heads, (True, False)):
        chunked = head.replace(b"content-length", b"x-length").replace(
            b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        parts = (head, DATA[:5], DATA[5:] + head, DATA, chunked, chunks, LAST)
        reply = await answer(server, *([b"".join(parts)] if is_whole else parts), pause=0.02)
        assert statuses(reply) == [200] * 4, (head, reply)
        assert reply.count(b'"text_completion"') == 4
        assert reply.count(json.dumps(wanted).encode()) == 4, "the body was read"


async def test_a_body_behind_an_upgrade_is_no_request(server: Server) -> None:
    """Were the body taken for the next request, a client could send requests in a proxy's name."""
    head = HEAD.replace(b"\r\n\r\n", b"\r\n" + H2C + b"\r\n")
    length = head.index(b"content-length: ")
    end = head.index(b"\r\n", length)
    smuggled = head[:length] + b"content-length: %d" % len(NOISE) + head[end:] + NOISE
    reply = await answer(server, smuggled + LAST)
    assert statuses(reply) == [400, 200], reply  # the first one's body is no JSON
    assert b'"list"' not in reply


@pytest.mark.sweep
async def test_thousands_of_upgrades_in_one_piece(server: Server) -> None:
    get = b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + H2C + b"\r\n"
    assert statuses(await answer(server, get * 3000 + LAST)) == [200] * 3001


@pytest.mark.parametrize("stream", [False, True])
async def test_a_half_closed_client_gets_its_reply(server: Server, stream: bool) -> None:
    head, data = raw_request({"prompt": "Hi", "max_tokens": 100, "ignore_eos": True, "stream": stream})
    reply = await answer(server, head, data, pause=0.02, ends=True)
    final = reply[reply.index(b"HTTP/1.1 200") :]
    assert set(statuses(reply[: -len(final)])) <= {100}
    assert b'"finish_reason":"length"' in final
    if not stream:
        assert b"connection: close" in final
        assert len(final.partition(b"\r\n\r\n")[2]) == int(final.partition(b"content-length: ")[2].partition(b"\r")[0])


async def test_half_a_request_that_ends_is_refused(server: Server) -> None:
    for part in (HEAD[:-2], HEAD, HEAD + DATA[:-1]):
        assert statuses(await answer(server, part, ends=True)) == [400], part


async def test_a_client_that_has_gone_is_not_computed_for(server: Server) -> None:
    """To end one's side and to be gone look alike at first."""
    head, data = raw_request({"prompt": "Hi", "max_tokens": 1900, "ignore_eos": True})
    _, writer = await dial(server)
    writer.write(head + data)
    await asyncio.to_thread(until, lambda: server.metric("fwk:num_requests_running") == 1, 5, "that it runs")
    writer.close()
    await asyncio.to_thread(until, lambda: server.is_idle(), 1.5, "that it is aborted")


async def test_what_a_head_may_not_say(server: Server) -> None:
    for expected, header in (
        (415, b"content-encoding: gzip"),
        (415, b"content-encoding: br"),
        (200, b"content-encoding: identity"),
        (417, b"expect: 200-ok"),
        (400, b"host: other"),
    ):
        reply = await answer(server, with_headers(header, b"connection: close"))
        assert statuses(reply) == [expected], (header, reply)
        assert expected == 200 or json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["message"]


async def test_bodies_of_other_kinds(server: Server) -> None:
    """Browsers send these to any server without asking it first."""
    for kind in (b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data", b""):
        head = HEAD.replace(b"content-type: application/json", b"connection: close\r\ncontent-type: " + kind)
        assert statuses(await answer(server, head + DATA)) == [415], kind


async def test_a_page_cannot_point_its_name_here(server: Server) -> None:
    """DNS rebinding: a browser that was sent to 127.0.0.1 still says whom it thinks it talks to."""
    ours = (b"localhost", b"localhost:8000", b"LOCALHOST", b"127.0.0.1:1", b"[::1]:8000", b"192.168.0.7")
    ours = (*ours, b"host.docker.internal:8000", socket.gethostname().encode())
    others = (b"evil.example", b"localhost.evil.example:8000", b"127.0.0.1.evil.example", b"", b"x.docker.internal")
    for name in (*ours, *others):
        reply = await answer(server, LAST.replace(b"host: localhost", b"host: " + name))
        assert statuses(reply) == [200 if name in ours else 421], (name, reply)


async def test_no_host_at_all(server: Server) -> None:
    assert statuses(await answer(server, b"GET /health HTTP/1.1\r\n\r\n")) == [400]
    assert statuses(await answer(server, b"GET /health HTTP/1.0\r\n\r\n")) == [200]


async def test_allowed_hosts(spawn: Start) -> None:
    """With a key any name will do: ``test_the_key_opens`` of tests/e2e/test_server.py."""
    named = spawn(*FAKE, "--allowed-hosts", "llm.example", "*.inner.example", "127.0.0.1")
    for name, expected in ((b"llm.example:80", 200), (b"a.Inner.example", 200), (b"inner.example", 421), (b"x", 421)):
        get = b"GET /health HTTP/1.1\r\nconnection: close\r\nhost: " + name + b"\r\n\r\n"
        assert statuses(await answer(named, get)) == [expected], name


async def test_a_path_that_is_not_there_is_not_repeated(server: Server) -> None:
    reply = await answer(server, b"GET /no/such/place HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    assert statuses(reply) == [404]
    assert b"such" not in reply
