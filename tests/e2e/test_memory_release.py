"""The administrator releases the engines' memory, and resumes: what requests see, and that nothing is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import psutil
import pytest

from tests.helpers.client import connect
from tests.helpers.http import NO_TLS
from tests.helpers.rig import GOLDEN, Server
from tests.helpers.servers import Start

ADMIN = {"authorization": "Bearer admin-key"}


def post(server: Server, path: str, body: Any = None, status: int = 200) -> str:
    reply = httpx.post(server.url + path, json=body, headers=ADMIN, verify=NO_TLS, timeout=60)
    assert reply.status_code == status, reply.text
    return reply.text


def is_sleeping(server: Server) -> bool:
    return httpx.get(f"{server.url}/is_sleeping", headers=ADMIN, verify=NO_TLS).json()["is_sleeping"]


TWO = pytest.param(["--data-parallel-size", "2"], marks=pytest.mark.sweep)


@pytest.fixture(scope="module", params=[[], TWO], ids=["one engine", "two"])
def server(spawn: Start, request: pytest.FixtureRequest) -> Server:
    return spawn("--enable-memory-saver", "--admin-api-key", "admin-key", *request.param)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("down", "up"),
    [("/release_memory_occupation", "/resume_memory_occupation"), ("/sleep?level=2", "/wake_up")],
)
def test_engines_end_and_come_again(server: Server, down: str, up: str) -> None:
    before = server.engines()
    post(server, down)
    post(server, down)  # nothing changes
    assert is_sleeping(server)
    assert not any(psutil.pid_exists(engine.pid) for engine in before)
    reply = server.post(GOLDEN)
    assert reply.status_code == 503
    assert "POST /resume_memory_occupation" in reply.text
    assert server.get("/health").status_code == 503
    post(server, up)
    post(server, up)
    assert not is_sleeping(server)
    assert len(server.engines()) == len(before)
    assert server.health() == 200
    assert server.post(GOLDEN).json()["choices"][0]["token_ids"] == server.golden
    server.settle()
    server.check_invariants()


@pytest.mark.sweep
async def test_what_runs_is_not_lost(server: Server) -> None:
    async with connect(server) as client:
        running = asyncio.create_task(client.stream(prompt="a", max_tokens=400, ignore_eos=True))
        while not server.metric("fwk:num_requests_running"):
            await asyncio.sleep(0.05)
        assert "when all requests have ended" in await asyncio.to_thread(
            post, server, "/release_memory_occupation", None, 400
        )
        stream = await running
    assert stream.is_done
    assert len(stream.token_ids[0]) == 400
    assert server.health() == 200


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/release_memory_occupation", {"tags": ["kv_cache"]}, "as a whole"),
        ("/release_memory_occupation", {"tag": []}, "tag"),
        ("/sleep?level=3", None, "it is 1 or 2"),
    ],
)
def test_what_is_asked_wrongly_is_refused(server: Server, path: str, body: Any, words: str) -> None:
    assert words in post(server, path, body, 400)
    assert server.post(None, path).status_code == 401
    assert server.health() == 200


@pytest.mark.sweep
def test_without_the_option_there_are_no_such_routes(spawn: Start) -> None:
    without = spawn("--admin-api-key", "admin-key")
    post(without, "/release_memory_occupation", None, 404)
    post(without, "/sleep", None, 404)
