"""/remote_instance_weights: what is given out, to how many at once, and when nothing is."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.http_app import listening
from tests.helpers.seed_server import SeedFrontend, noted, seed_app

from fwk_server.tgi import remote_weights
from fwk_server.tgi.remote_weights import BLOCK_BYTES, DIGEST_BYTES, PATH

BYTES = os.urandom(5 * BLOCK_BYTES + 17)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 8}))
    tensors = {"big": torch.frombuffer(bytearray(BYTES), dtype=torch.uint8), "none": torch.empty(0, 3)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def frontend(folder: Path) -> SeedFrontend:
    found = SeedFrontend()
    found.served_weights = noted(folder)
    return found


@pytest.fixture
async def url(frontend: SeedFrontend) -> AsyncIterator[str]:
    async with listening(seed_app(frontend), lifespan="off") as found:
        yield found


@pytest.fixture
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as found:
        yield found


async def identity(client: httpx.AsyncClient) -> str:
    return (await client.get(PATH)).json()["identity"]


def read(framed: bytes) -> tuple[bytes, str]:
    """The data of whole blocks, and the sentence that comes in place of the rest."""
    found, place = b"", 0
    while place < len(framed):
        (size,) = struct.unpack_from("<I", framed, place)
        if not size:
            return found, framed[place + 4 :].decode()
        assert size <= BLOCK_BYTES
        found += framed[place + 4 : place + 4 + size]
        place += 4 + size + DIGEST_BYTES
    assert place == len(framed)
    return found, ""


async def test_the_index_and_a_tensor(client: httpx.AsyncClient) -> None:
    index = (await client.get(PATH)).json()
    assert index["tensors"] == {"big": ["U8", [len(BYTES)]], "none": ["F32", [0, 3]]}
    assert (index["version"], index["config"]["hidden_size"]) == (1, 8)
    asked = {"identity": index["identity"], "name": "big"}
    reply = await client.get(f"{PATH}/tensor", params=asked)
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/octet-stream")
    assert read(reply.content) == (BYTES, "")
    assert (await client.get(f"{PATH}/tensor", params=asked | {"name": "none"})).content == b""
    head = await client.head(f"{PATH}/tensor", params=asked)
    assert (head.status_code, head.content) == (200, b"")


@pytest.mark.gate(3)
@pytest.mark.parametrize(
    ("params", "status", "words"),
    [
        ({"name": "../model.safetensors"}, 404, "no tensor '../model.safetensors'"),
        ({"name": "/etc/passwd"}, 404, "no tensor"),
        ({"name": "model.safetensors"}, 404, "no tensor"),
        ({"name": "x" * 1025}, 400, "name: String should have at most 1024"),
        ({"name": "big", "identity": "0" * 32}, 409, "other weights"),
        ({"name": "big", "identity": "0" * 65}, 400, "identity: String should have at most 64"),
        ({"name": "big", "identity": ""}, 409, "other weights"),
    ],
)
async def test_what_is_not_there(client: httpx.AsyncClient, params: dict[str, str], status: int, words: str) -> None:
    reply = await client.get(f"{PATH}/tensor", params={"identity": await identity(client)} | params)
    assert (reply.status_code, words in reply.json()["error"]) == (status, True), reply.text


async def test_both_parameters_are_needed(client: httpx.AsyncClient) -> None:
    for params in ({"name": "big"}, {"identity": await identity(client)}):
        reply = await client.get(f"{PATH}/tensor", params=params)
        assert (reply.status_code, "Field required" in reply.json()["error"]) == (400, True)


@pytest.mark.gate(1)
@pytest.mark.parametrize("loader", ["dummy", "gguf", "remote_instance"])
async def test_loaders_without_files_of_tensors(client: httpx.AsyncClient, frontend: SeedFrontend, loader: str) -> None:
    asked = {"identity": await identity(client), "name": "big"}
    assert frontend.served_weights is not None
    frontend.served_weights = replace(frontend.served_weights, loader=loader, files={})
    for path in (PATH, f"{PATH}/tensor"):
        reply = await client.get(path, params=asked)
        assert reply.status_code == 409
        assert f"the loader '{loader}' read the weights" in reply.json()["error"]
    frontend.served_weights = None
    reply = await client.get(PATH)
    assert (reply.status_code, "does not know the files" in reply.json()["error"]) == (409, True)


async def _stopped(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, change: Any, after: int
) -> tuple[bytes, str]:
    """A stream in which ``change`` happens before block ``after`` is read: its blocks, and its last words."""
    asked = {"identity": await identity(client), "name": "big"}
    make, count = remote_weights._block, 0

    def block(*args: Any) -> bytes:
        nonlocal count
        count += 1
        if count == after:
            change()
        return make(*args)

    monkeypatch.setattr(remote_weights, "_block", block)
    reply = await client.get(f"{PATH}/tensor", params=asked)
    assert reply.status_code == 200
    return read(reply.content)


@pytest.mark.gate(1)
@pytest.mark.parametrize("after", [1, 3, 6])
async def test_a_stream_ends_where_the_file_changes(
    client: httpx.AsyncClient, folder: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    path = folder / "model.safetensors"
    blocks, words = await _stopped(client, monkeypatch, lambda: os.utime(path), after)
    assert words == "model.safetensors cannot be read, or is no longer what was served"
    assert blocks == BYTES[: (after - 1) * BLOCK_BYTES]


async def test_a_stream_ends_where_other_weights_serve(
    client: httpx.AsyncClient, frontend: SeedFrontend, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def update() -> None:
        frontend.served_weights = noted(folder)

    blocks, words = await _stopped(client, monkeypatch, update, 3)
    assert words == "the server has taken other weights meanwhile"
    assert BYTES.startswith(blocks)
    assert len(blocks) < len(BYTES)


async def test_a_file_that_shrinks_is_noticed(
    client: httpx.AsyncClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "model.safetensors"
    _, words = await _stopped(client, monkeypatch, lambda: os.truncate(path, 2 * BLOCK_BYTES), 5)
    assert "no longer what was served" in words


async def test_many_at_once_leave_the_event_loop_free(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"identity": await identity(client), "name": "big"}
    make, threads = remote_weights._block, set[str]()

    def block(*args: Any) -> bytes:
        threads.add(threading.current_thread().name)
        return make(*args)

    monkeypatch.setattr(remote_weights, "_block", block)
    replies = await asyncio.gather(*(client.get(f"{PATH}/tensor", params=asked) for _ in range(24)))
    assert all(read(reply.content) == (BYTES, "") for reply in replies)
    assert 0 < len(threads) <= remote_weights.NUM_READERS
    assert all(name.startswith("fwk-weights") for name in threads)


@pytest.mark.sweep
async def test_who_does_not_read_is_not_read_for(
    client: httpx.AsyncClient, frontend: SeedFrontend, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that stops reading holds a few blocks, whatever the tensor's size; one that leaves holds none."""
    save_file({"huge": torch.zeros(200 * BLOCK_BYTES, dtype=torch.uint8)}, folder / "model.safetensors")
    frontend.served_weights = noted(folder)
    make, count = remote_weights._block, 0

    def block(*args: Any) -> bytes:
        nonlocal count
        count += 1
        return make(*args)

    monkeypatch.setattr(remote_weights, "_block", block)
    wanted = await identity(client)
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**16)
    writer.write(f"GET {PATH}/tensor?identity={wanted}&name=huge HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    await reader.readline()
    before = -1
    while count != before:
        before = count
        await asyncio.sleep(0.3)
    assert 0 < count < 40
    writer.close()
    await asyncio.sleep(0.3)
    assert count <= before + 2
    assert await identity(client) == wanted
