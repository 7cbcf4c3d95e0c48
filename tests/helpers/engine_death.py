"""Streams to be under way when an engine dies, and what must hold of its server afterwards."""

from __future__ import annotations

import asyncio

from tests.helpers.client import Client, Streamed, together
from tests.helpers.rig import Server, until

AT_ONCE = 1.0


async def begin(client: Client, count: int, max_tokens: int = 400) -> tuple[list[Streamed], asyncio.Future[list]]:
    """Streams under way; those for which the engine has room have begun when this returns."""
    streams = [Streamed() for _ in range(count)]
    work = [client.stream(s, prompt=f"stream {i}", max_tokens=max_tokens) for i, s in enumerate(streams)]
    running = asyncio.ensure_future(together(work))
    await asyncio.wait_for(asyncio.gather(*(s.has_begun.wait() for s in streams[:8])), 20)
    return streams, running


def check_dead(server: Server) -> None:
    """What a server without an engine still does: say so."""
    until(lambda: server.health() == 503, AT_ONCE, "health 503")
    reply = server.get("/health").json()
    assert "engine" in reply["reason"]
    for path, body in (
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/completions", {"prompt": "Hi", "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ):
        refused = server.post(body, path)
        assert refused.status_code == 503, refused.text
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "engine_unavailable"
    assert server.get("/v1/models").status_code == 200
    assert server.get("/metrics").status_code == 200
    assert "Traceback" not in server.log
    assert server.log.count("engine dead") == 1, server.log


def check_killed_loudly(server: Server, rank: int, pid: int) -> None:
    """The server says so, names the rank whose process was killed, keeps no other, and ends as told."""
    check_dead(server)
    said = [line for line in server.log.splitlines() if f"rank {rank}" in line and "ERROR" in line]
    assert said
    assert all(f"(pid {pid}) was killed by signal 9 (SIGKILL)" in line for line in said)
    until(lambda: server.engines(recursive=True) == [], 5, "no process is left")
    check_ended(server)


def check_ended(server: Server) -> None:
    """It still ends as told, and leaves nothing."""
    assert server.stop() == 0
    assert not server.leftovers, server.leftovers
