"""Checks 15 and 41: what is not quite HTTP, what never ends, and more connections than there are descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import resource
import socket
import time

import psutil
import pytest

from fwk_http.connection import MAX_HEAD_BYTES, MAX_HEADERS
from tests.helpers.client import answer, connect, dial, raw_request
from tests.helpers.rig import FAKE, Server, until
from tests.helpers.servers import Start

pytestmark = pytest.mark.usefixtures("as_before")

READ_SECONDS = 2.0
MEGABYTE = 2**20
HEAD, DATA = raw_request({"prompt": "Hi", "max_tokens": 1, "temperature": 0})
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def post(*headers: bytes, body: bytes = b"") -> bytes:
    return POST + b"".join(header + b"\r\n" for header in headers) + b"\r\n" + body


def get(*headers: bytes, line: bytes = b"GET /health HTTP/1.1") -> bytes:
    return line + b"\r\nhost: localhost\r\n" + b"".join(header + b"\r\n" for header in headers) + b"\r\n"


@pytest.fixture(scope="module")
def server(spawn: Start) -> Server:
    return spawn(*FAKE, "--read-timeout", str(READ_SECONDS))


def status(reply: bytes) -> int:
    assert reply.startswith(b"HTTP/1.1 "), reply[:100]
    return int(reply[9:12])


REFUSED = {
    "a header of 64 KB": (431, get(b"x-long: " + b"x" * 65536)),
    "10,000 headers": (431, get(*(b"x-%d: y" % i for i in range(10_000)))),
    "one header too many": (431, get(*(b"x: y" for _ in range(MAX_HEADERS)))),
    "a head just too long": (431, get(b"x: " + b"x" * MAX_HEAD_BYTES)),
    "a path of 40 KB": (431, get(line=b"GET /" + b"x" * 40_000 + b" HTTP/1.1")),
    "a header that never ends": (431, b"GET / HTTP/1.1\r\nx: " + b"x" * 40_000),
    "a path that never ends": (431, b"GET /" + b"x" * 40_000),
    "a length of 1 GB": (413, post(b"content-length: 1073741824")),
    "a negative length": (400, post(b"content-length: -1")),
    "a length in words": (400, post(b"content-length: ten")),
    "a length past 64 bits": (400, post(b"content-length: 99999999999999999999999")),
    "two lengths": (400, post(b"content-length: 2", b"content-length: 30", body=DATA)),
    "a length and chunks": (400, post(b"content-length: 2", b"transfer-encoding: chunked", body=b"0\r\n\r\n")),
    "an unknown encoding": (501, post(b"transfer-encoding: gzip", body=DATA)),
    "a chunk of no number": (400, post(b"transfer-encoding: chunked", body=b"zz\r\n{}\r\n0\r\n\r\n")),
    "a chunk past 64 bits": (400, post(b"transfer-encoding: chunked", body=b"f" * 20 + b"\r\n{}\r\n0\r\n\r\n")),
    "a chunk longer than told": (400, post(b"transfer-encoding: chunked", body=b"2\r\n{}{}\r\n0\r\n\r\n")),
    "a name with a space": (400, get(b"x y: z")),
    "a header without a colon": (400, get(b"nothing")),
    "NUL in a header": (400, get(b"x: a\0b")),
    "a folded header": (400, get(b"x: a", b" b")),
    "another version": (400, get(line=b"GET /health HTTP/9.9")),
    "HTTP/2": (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "TLS": (400, bytes.fromhex("16030100a5010000a10303") + b"\0" * 160),
    "noise": (400, bytes(range(256)) * 8),
    "a method nobody knows": (400, get(line=b"BREW /health HTTP/1.1")),
}  # fmt: skip


async def test_refused(server: Server) -> None:
    for name, (expected, data) in REFUSED.items():
        reply = await answer(server, data)
        assert status(reply) == expected, (name, reply[:200])
        head, _, body = reply.partition(b"\r\n\r\n")
        assert json.loads(body)["error"]["message"], name
        assert b"connection: close" in head.lower(), name


async def test_a_body_packed_a_thousandfold_is_not_unpacked(server: Server) -> None:
    packed = gzip.compress(b" " * 50 * MEGABYTE)
    data = post(b"content-encoding: gzip", b"content-length: %d" % len(packed), b"connection: close", body=packed)
    assert status(await answer(server, data)) == 415


@pytest.mark.sweep
async def test_millions_of_chunks_of_one_byte(server: Server) -> None:
    """6 bytes on the wire for each of the body; what they make together is no JSON."""
    chunks = b"1\r\n \r\n" * 50_000
    head = post(b"transfer-encoding: chunked", b"connection: close")
    reply = await answer(server, head, *[chunks] * 60, b"0\r\n\r\n")
    assert status(reply) in (400, 408), reply[:100]  # a slow machine has not read it all in time


@pytest.mark.gate(1)
@pytest.mark.parametrize("sent", [b"", HEAD[:-2], HEAD, HEAD + DATA[:-1], get(b"x: y")[:-2]])
async def test_half_a_request_then_silence(server: Server, sent: bytes) -> None:
    started = time.monotonic()
    reply = await answer(server, sent)
    assert status(reply) == 408
    assert READ_SECONDS - 0.1 < time.monotonic() - started < READ_SECONDS + 3


@pytest.mark.sweep
async def test_a_byte_now_and_then_is_no_request_either(server: Server) -> None:
    reader, writer = await dial(server)
    started = time.monotonic()
    reading = asyncio.create_task(reader.read(12))
    with contextlib.suppress(ConnectionError):
        for byte in HEAD[:-2] + b"x: " + b"y" * 1000:  # a minute of it
            writer.write(bytes([byte]))
            await asyncio.sleep(0.05)
            if reading.done() or time.monotonic() - started > READ_SECONDS + 3:
                break
    assert await asyncio.wait_for(reading, 1) == b"HTTP/1.1 408"
    writer.close()


@pytest.mark.sweep
async def test_a_connection_may_be_used_again_after_a_while(server: Server) -> None:
    """Time between requests is not time spent on one."""
    reader, writer = await dial(server)
    for pause in (READ_SECONDS + 0.5, 0):
        writer.write(HEAD + DATA)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
        await asyncio.sleep(pause)
    writer.close()


@pytest.mark.sweep
async def test_a_request_that_waits_for_the_server_has_time(spawn: Start, server: Server) -> None:
    """The admission holds it back before its body is read."""
    narrow = spawn(*FAKE, "--fake-step-ms", "20", "--read-timeout", "1", "--concurrency-limit", "1",
                   "--concurrency-with-block")  # fmt: skip
    head, data = raw_request({"prompt": "x" * 1900, "max_tokens": 1, "user": "u" * MEGABYTE})
    async with connect(narrow) as client:
        long = asyncio.create_task(client.complete(prompt="long", max_tokens=100, ignore_eos=True))
        await asyncio.to_thread(until, lambda: narrow.metric("fwk:num_requests_running") == 1, 5, "the long one")
        reply = await answer(narrow, head.replace(b"host: localhost", b"host: localhost\r\nconnection: close"), data)
        assert status(reply) == 200, reply[:200]
        await long


async def test_old_and_odd_but_right(server: Server) -> None:
    for data in (
        get(line=b"GET /health HTTP/1.0"),
        get(b"connection: close", line=b"GET http://elsewhere/health HTTP/1.1"),
        get(b"connection: close", line=b"GET /health?x=1&x=2 HTTP/1.1"),
        get(b"connection: close", b"X-ODD:", b"x-t:\ty"),
        get(b"connection: close", b"expect: 100-continue"),
    ):
        assert status(await answer(server, data)) in (100, 200), data


async def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    last = HEAD.replace(b"host: localhost", b"host: localhost\r\nconnection: close")
    reply = await answer(server, (HEAD + DATA) * 9 + get() + last + DATA)
    assert reply.count(b"HTTP/1.1 200 OK") == 11
    assert reply.count(b'"text_completion"') == 10
    assert reply.rindex(b'"status":"ok"') < reply.rindex(b'"text_completion"')


@pytest.mark.sweep
def test_more_connections_than_descriptors(spawn: Start, server: Server) -> None:
    """400 for a process that may have 256 files: some are turned away, nothing spins, and then all is well."""
    small = spawn(*FAKE)
    resource.prlimit(small.process.pid, resource.RLIMIT_NOFILE, (256, 256))
    host, port = small.url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as held:
        for _ in range(400):
            held.enter_context(socket.create_connection((host, int(port)), timeout=10))
        time.sleep(0.5)
        process = psutil.Process(small.process.pid)
        before = sum(process.cpu_times()[:2])
        time.sleep(2)
        assert sum(process.cpu_times()[:2]) - before < 1, "the loop spins over connections it cannot take"
        assert small.is_running
    until(lambda: _is_served(small), 10, "a free descriptor")
    small.check_invariants(may_log_errors=True)


def _is_served(server: Server) -> bool:
    with contextlib.suppress(Exception):
        return server.health() == 200
    return False
