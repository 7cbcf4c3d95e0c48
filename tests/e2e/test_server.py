"""The server as its operators and clients know it: a process, a port, signals, streams."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from fwk.plugins import discover
from tests.helpers.client import Streamed, connect, together
from tests.helpers.http import NO_TLS
from tests.helpers.rig import FAKE, Server, assert_no_leak, until
from tests.helpers.servers import Start
from tests.helpers.zygote import zygote

PAGE_FILES = (
    "api.js",
    "app.js",
    "chat.js",
    "docs.js",
    "history.js",
    "images.js",
    "markdown.js",
    "responses.js",
    "server.js",
    "store.js",
    "stream.js",
    "style.css",
    "tools.js",
)
VENDOR = (
    "highlight/LICENSE.txt",
    "highlight/bash.min.js",
    "highlight/core.min.js",
    "highlight/cpp.min.js",
    "highlight/diff.min.js",
    "highlight/go.min.js",
    "highlight/java.min.js",
    "highlight/javascript.min.js",
    "highlight/json.min.js",
    "highlight/python.min.js",
    "highlight/rust.min.js",
    "highlight/shell.min.js",
    "highlight/xml.min.js",
    "highlight/yaml.min.js",
    "markdown-it.LICENSE.txt",
    "markdown-it.min.js",
    "temml.LICENSE.txt",
    "temml.min.js",
)
KEY = "sk-the-key-of-the-tests"
ADMIN_KEY = "sk-the-key-of-the-administrator"
PAGE = {"/", "/docs"} | {f"/playground/{name}" for name in (*PAGE_FILES, *(f"vendor/{name}" for name in VENDOR))}
PUBLIC = {"/health", "/ready"} | PAGE
ADMIN = {f"{start}/{verb}_lora_adapter" for start in ("/v1", "") for verb in ("load", "unload")} | {
    "/plugins/switch",
    "/update_weights_from_disk",
    "/remote_instance_weights",
    "/remote_instance_weights/tensor",
}
NUM_STREAMS = 32


@pytest.fixture(scope="module", params=["tiny", "fake"])
def server(request: pytest.FixtureRequest) -> Server:
    return request.getfixturevalue(request.param)


@pytest.mark.gate(1)
async def test_streams_say_what_is_said_in_one_piece(server: Server) -> None:
    """32 at once: different lengths, several choices, long prompts, common prefixes."""
    bodies: list[dict[str, Any]] = [
        {
            "prompt": f"{'a common prefix of all, ' * (i % 5)}request {i % 48}",
            "max_tokens": 1 + (i * 7) % 50,
            "n": 3 if i % 16 == 0 else 1,
            "ignore_eos": i % 2 == 0,
        }
        for i in range(NUM_STREAMS)
    ]
    async with connect(server) as client:
        whole = []
        for body in bodies:
            status, reply = await client.post({"temperature": 0, "return_token_ids": True} | body)
            assert status == 200, reply
            whole.append({choice["index"]: choice for choice in reply["choices"]})
        streams: list[Streamed] = await together(client.stream(**body) for body in bodies)
    for stream, choices in zip(streams, whole, strict=True):
        assert (stream.status, stream.is_done, stream.errors) == (200, True, [])
        assert stream.texts == {index: choice["text"] for index, choice in choices.items()}
        assert stream.token_ids == {index: choice["token_ids"] for index, choice in choices.items()}
        assert stream.reasons == {index: choice["finish_reason"] for index, choice in choices.items()}
        for index, text in stream.texts.items():
            assert text == spelled(stream.token_ids[index])
    server.check_invariants()


def spelled(token_ids: list[int]) -> str:
    """What ids say in the byte tokeniser of the dummy loader: bytes, three special tokens, names for the others."""
    parts = (bytes([i]) if i < 256 else b"" if i < 259 else f"<{i}>".encode() for i in token_ids)
    return b"".join(parts).decode("utf-8", "replace")


async def test_sampled_streams_with_a_seed(tiny: Server) -> None:
    """The same request gives the same text alone and among others."""
    bodies = [{"prompt": f"seed {i}", "max_tokens": 40, "temperature": 1.0, "seed": i} for i in range(16)]
    async with connect(tiny) as client:
        alone = [await client.complete(**body) for body in bodies]
        streams = await together(client.stream(**body) for body in bodies)
    assert [stream.token_ids[0] for stream in streams] == [ids for (ids,) in alone]


async def test_every_reply_carries_the_request_id(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, verify=NO_TLS) as http:
        for path, body in (("/health", None), ("/v1/completions", {"prompt": "Hi"}), ("/nothing", None)):
            method = "POST" if body else "GET"
            named = await http.request(method, path, json=body, headers={"x-request-id": "mine-42"})
            assert named.headers.get_list("x-request-id") == ["mine-42"]
            unnamed = [(await http.request(method, path, json=body)).headers["x-request-id"] for _ in range(2)]
            assert len(set(unnamed)) == 2
        for bad in ("x" * 129, "a b", "tab\tbed", "caf\xe9".encode("latin-1"), ""):
            reply = await http.get("/health", headers={"x-request-id": bad})
            assert reply.headers["x-request-id"] not in ("", bad)
        same = [http.post("/v1/completions", json={"prompt": "Hi"}, headers={"x-request-id": "twin"}) for _ in range(4)]
        replies = await asyncio.gather(*same)
        assert {reply.status_code for reply in replies} == {200}
        assert len({reply.json()["id"] for reply in replies}) == 4
    server.check_invariants()


@pytest.fixture(scope="module")
def locked(spawn: Start) -> Iterator[Server]:
    """A server that asks for keys."""
    return spawn(*FAKE, "--admin-api-key", ADMIN_KEY, key=KEY, forked=False)


def routes(server: Server) -> list[tuple[str, str]]:
    """Every method and path the application has, as the running server tells it."""
    found = server.get("/faults/routes").json()
    assert all(path is not None and methods for methods, path in found), "a route this test cannot walk"
    return [(method, path.replace("{name:path}", "tiny")) for methods, path in found for method in methods]


def test_a_key_is_asked_for_everywhere_but(locked: Server) -> None:
    found = routes(locked)
    assert {path for _, path in found} >= {
        "/v1/completions",
        "/v1/chat/completions",
        "/server_info",
        "/metrics",
    } | PUBLIC | ADMIN
    odd = [
        "/playground/",
        "/playground/app.js/",
        "/nothing",
        "//v1/models",
        "/v1/%6dodels",
        "/health/",
        "/health/x",
        "/HEALTH",
        "/v1/%2e%2e/health",
    ]
    found += [("GET", path) for path in odd]
    found += [(method, path) for method in ("OPTIONS", "HEAD", "PUT", "DELETE", "TRACE") for _, path in found[:4]]
    wrong = [
        {}, {"authorization": ""}, {"authorization": "Bearer"}, {"authorization": "Bearer x"},
        {"authorization": f"Bearer {KEY}x"}, {"authorization": f"Bearer {KEY[:-1]}"}, {"authorization": KEY},
        {"authorization": f"Basic {KEY}"}, {"x-api-key": f"{KEY}x"}, {"x-api-key": ""},
        {"host": "x/health?", "authorization": "Bearer no"},
    ]  # fmt: skip
    with httpx.Client(base_url=locked.url, verify=NO_TLS) as http:
        for place, (method, path) in enumerate(found):
            is_public = path in PUBLIC and method in ("GET", "HEAD")
            for headers in wrong if place < 8 else (wrong[0], wrong[4], wrong[-1]):
                reply = http.request(method, path, headers=headers)
                assert reply.status_code == (200 if is_public else 401), (method, path, headers, reply.text)
                assert KEY not in reply.text
            for key, is_for_admins in ((KEY, False), (ADMIN_KEY, True)):
                reply = http.request(method, path, headers={"authorization": f"Bearer {key}"})
                opens = is_public or (path in ADMIN) == is_for_admins
                assert (reply.status_code != 401) == opens, (method, path, key, reply.text)
                if path != "/server_info":  # the configuration, folders too
                    assert_no_leak(reply.text)
    locked.check_invariants()


def test_admin_routes_are_not_there_unless_asked_for(fake: Server) -> None:
    assert not {path for _, path in routes(fake)} & ADMIN
    for path in ADMIN:
        for headers in ({}, {"authorization": f"Bearer {ADMIN_KEY}"}):
            reply = httpx.post(
                fake.url + path, json={"lora_name": "x", "lora_path": "x"}, headers=headers, verify=NO_TLS
            )
            assert reply.status_code == 404


def test_the_key_opens(locked: Server) -> None:
    for scheme in ("Bearer", "bearer", "BEARER"):
        headers = {"authorization": f"{scheme} {KEY}"}
        assert httpx.get(locked.url + "/v1/models", headers=headers, verify=NO_TLS).status_code == 200
    assert httpx.get(locked.url + "/v1/models", headers={"x-api-key": KEY}, verify=NO_TLS).status_code == 200
    for name in ("llm.example:80", "x"):
        assert httpx.get(locked.url + "/health", headers={"host": name}, verify=NO_TLS).status_code == 200
    words = "what the client alone knows"
    assert locked.post({"prompt": words, "max_tokens": 1}).status_code == 200
    assert locked.post({"prompt": words, "max_tokens": 10**6}).status_code == 400
    info = locked.get("/server_info")
    assert info.status_code == 200
    assert info.json()["server"]["api_key"] == info.json()["server"]["admin_api_key"] == "(hidden)"
    for key in (KEY, ADMIN_KEY, words):
        for text in (info.text, locked.get("/metrics").text, locked.log):
            assert key not in text
    assert locked.get("/nothing").status_code == 404


def test_a_websocket_is_refused(locked: Server) -> None:
    host, port = locked.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(
            b"GET /health HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
            b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
        )
        assert b" 101 " not in connection.recv(4096)


def test_torch_is_the_engines_alone(locked: Server) -> None:
    """In the API process it would cost each start two seconds, and 150 MB for good."""
    assert locked.engine is not None
    held = ["libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in (locked.process.pid, locked.engine.pid)]
    assert held == [False, True]


def test_others_are_forked_with_their_engine(fake: Server, locked: Server) -> None:
    """Of what has imported the same; else hundreds of seconds of the tests are imports."""
    assert not zygote().differing(os.environ), "a test has set variables for those after it"
    for server, module in ((fake, "zygote.py"), (locked, "fwk")):
        assert server.engine is not None
        assert any(module in word for word in psutil.Process(server.process.pid).cmdline()[1:4])
        assert any(module in word for word in server.engine.cmdline()[1:4])


def test_nothing_of_the_rig_is_installed() -> None:
    """The tests' plugins exist in the servers they start, and nowhere else."""
    assert "fwk-faults" not in {item.package for item in discover().all()}


@pytest.mark.sweep  # tests/faults/test_lifecycle.py drains one by SIGINT
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_ends_it_well(spawn: Start, number: signal.Signals) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("the signal is ignored here, as below nohup, and by the server then too")
    server = spawn(*FAKE, "--fake-step-ms", "10")
    async with connect(server) as client:
        streams = [Streamed() for _ in range(16)]  # half of them wait for their turn
        work = [client.stream(s, prompt=f"{i}", max_tokens=60) for i, s in enumerate(streams)]
        running = asyncio.ensure_future(together(work))
        await asyncio.wait_for(asyncio.gather(*(s.has_begun.wait() for s in streams[:8])), 20)
        server.process.send_signal(number)
        await running
    assert all(s.is_done and not s.errors and s.reasons == {0: "length"} for s in streams), "cut off, with time enough"
    assert server.wait(15) == 0
    assert not server.leftovers
    assert "Traceback" not in server.log


@pytest.mark.sweep
async def test_a_signal_and_streams_that_would_take_too_long(spawn: Start) -> None:
    server = spawn(*FAKE, "--fake-step-ms", "50")
    async with connect(server) as client:
        streams = [Streamed() for _ in range(12)]
        work = [client.stream(s, prompt=f"{i}", max_tokens=1500) for i, s in enumerate(streams)]
        running = asyncio.ensure_future(together(work))
        await asyncio.wait_for(asyncio.gather(*(s.has_begun.wait() for s in streams[:8])), 20)
        started = time.monotonic()
        server.process.terminate()
        await running
    assert server.wait(15) == 0
    assert time.monotonic() - started < 15
    for stream in streams:
        assert len(stream.errors) == 1, "a stream that was cut off must be told so"
        assert stream.is_done or stream.status == 503
    assert not server.leftovers


def test_a_signal_while_it_starts(tiny_model: Path, python_path: str) -> None:
    server = Server(tiny_model, python_path=python_path, forked=False)
    try:
        until(lambda: psutil.Process(server.process.pid).children(), 20, "the engine process")
        server.process.terminate()
        assert server.process.wait(15) in (0, -signal.SIGTERM)
        until(lambda: not server.leftovers, 5, "an empty folder")
    finally:
        server.close()
