"""Checks 20, 21, 39 and 47: draining, engines that are started again, and a server that gives up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.client import connect, together
from tests.helpers.engine_death import begin
from tests.helpers.rig import FAKE, GOLDEN, Server, forks_engines, is_alive, is_helper, until
from tests.helpers.servers import Start

SLOW = (*FAKE, "--fake-step-ms", "20")
RESTART_SECONDS = 20.0


def status(server: Server, path: str) -> int:
    return server.get(path).status_code


def finished(server: Server) -> list[int]:
    """Requests that each replica has finished."""
    return [replica["stats"]["finished"] for replica in server.get("/server_info").json()["replicas"]]


def serves_again(server: Server) -> None:
    """Another engine has taken the place of the dead one, and knows the golden answer."""
    until(lambda: server.log.count("serves again") == 1 and server.health() == 200, RESTART_SECONDS, "a new engine")
    assert server.post({"prompt": "Hi", "max_tokens": 2}).status_code == 200
    server.take_new_engine()
    server.check_invariants()


async def test_a_draining_server_finishes_what_it_took(spawn: Start) -> None:
    server = spawn(*SLOW, "--shutdown-timeout", "30")
    assert status(server, "/ready") == 200
    async with connect(server) as client:
        streams, running = await begin(client, 8, max_tokens=60)
        is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as below nohup, and by the server then too
        server.process.send_signal(signal.SIGTERM if is_ignored else signal.SIGINT)  # others end by SIGTERM
        until(lambda: status(server, "/ready") == 503, 1, "not ready")
        assert server.health() == 200, "it lives"
        refused = server.post({"prompt": "Hi"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        await running
    assert all(s.is_done and not s.errors and s.reasons == {0: "length"} for s in streams)
    assert server.wait(10) == 0
    assert not server.leftovers


@pytest.mark.sweep
async def test_a_second_signal_ends_it_at_once(spawn: Start) -> None:
    server = spawn(*SLOW, "--shutdown-timeout", "600")
    async with connect(server) as client:
        streams, running = await begin(client, 8, max_tokens=1500)
        server.process.terminate()
        until(lambda: status(server, "/ready") == 503, 1, "not ready")
        await asyncio.sleep(0.5)
        assert not any(stream.errors for stream in streams)
        server.process.terminate()
        started = time.monotonic()
        await running
    assert server.wait(10) == 0
    assert time.monotonic() - started < 5
    assert all(s.is_done and len(s.errors) == 1 for s in streams)
    assert not server.leftovers


async def test_a_dead_engine_is_started_again(spawn: Start, tmp_path: Path) -> None:
    server = spawn(*SLOW, "--health-monitor", "--crash-dump-folder", str(tmp_path))
    async with connect(server) as client:
        streams, running = await begin(client, 12)
        await asyncio.to_thread(until, lambda: server.stats()["generation_tokens"] > 60, 10, "something to count")
        server.signal_engine(signal.SIGKILL)
        await running
        assert all(len(stream.errors) == 1 for stream in streams)
    until(lambda: server.health() == 503, 2, "health 503")
    before = server.stats()["generation_tokens"]
    assert before > 40
    assert status(server, "/ready") == 503
    serves_again(server)
    death, dump = [line for line in server.log.splitlines() if " ERROR " in line]
    assert str(tmp_path) in dump
    [file] = tmp_path.iterdir()
    died, *dumped = map(json.loads, file.read_text().splitlines())
    assert "SIGKILL" in died["reason"]
    assert sum(request["event"] == "under_way" for request in dumped) == 12
    for part in (
        "was killed by signal 9 (SIGKILL)",
        "12 requests ended with an error",
        "is started again in 0.5 seconds",
    ):
        assert part in death, "what, why, and what was done about it"
    assert server.stats()["generation_tokens"] > before, "counters never fall"
    assert server.stop() == 0
    assert not server.leftovers


@pytest.mark.sweep
def test_a_hung_engine_is_started_again(spawn: Start) -> None:
    """SIGSTOP: it does not end, so nobody but the watchdog can tell."""
    server = spawn(*SLOW, "--health-monitor", "--watchdog-timeout", "2", "--ping-timeout", "1")
    hung = server.engine
    server.signal_engine(signal.SIGSTOP)
    until(lambda: server.health() == 503, 4, "health 503")
    until(lambda: not is_alive(hung), 6, "the end of the hung engine")
    assert "has not answered for" in server.log
    serves_again(server)


@pytest.mark.sweep
def test_the_process_that_engines_are_forked_from_and_its_death(spawn: Start) -> None:
    """It forks another engine, costs the running one nothing when it dies, and all end with the API process."""
    server = spawn(*SLOW, "--health-monitor", "true", "--spare-engines", "1")
    [first] = [process for process in server.children() if forks_engines(process)]
    server.signal_engine(signal.SIGKILL)
    until(lambda: server.log.count("serves again") == 1, RESTART_SECONDS, "a new engine")
    assert is_alive(first)
    server.take_new_engine()
    first.kill()
    until(lambda: not is_alive(first), 5, "its end")
    assert server.post({"prompt": "a", "max_tokens": 2}).status_code == 200
    server.signal_engine(signal.SIGKILL)
    until(lambda: server.log.count("serves again") == 2, RESTART_SECONDS, "a new engine, of another one's")
    [second] = [process for process in server.children() if forks_engines(process)]
    [engine] = server.engines()
    engine.suspend()
    second.suspend()
    server.process.send_signal(signal.SIGKILL)
    until(lambda: not is_alive(engine) and not is_alive(second), 5, "their ends, with the API process")


@pytest.mark.sweep
async def test_only_the_dead_one_of_two_is_started_again(spawn: Start) -> None:
    server = spawn(*SLOW, "--health-monitor", "--data-parallel-size", "2", "--replica-slow-start", "3600")
    first, second = server.engines()
    async with connect(server) as client:
        streams, running = await begin(client, 8, max_tokens=100)
        first.kill()
        await running
        assert 0 < sum(bool(stream.errors) for stream in streams) < 8, "the other's requests go on"
        assert server.health() == 200
        until(lambda: server.get("/health").json()["status"] == "ok", RESTART_SECONDS, "both again")
        assert is_alive(second)
        assert len(server.engines()) == 2
        weights = [replica["weight"] for replica in server.get("/server_info").json()["replicas"]]
        new = weights.index(min(weights))
        assert weights[1 - new] == 1.0
        assert weights[new] < 0.2, "it comes back slowly"
        before = finished(server)
        await together(client.complete(prompt=f"{i}", max_tokens=4) for i in range(40))
        await asyncio.to_thread(until, lambda: sum(finished(server)) - sum(before) >= 40, 5, "reports of both")
        assert 1 <= finished(server)[new] - before[new] <= 8
    server.engine = second
    assert server.stop() == 0


@pytest.mark.sweep
async def test_requests_without_a_token_go_to_the_other_engine(spawn: Start) -> None:
    server = spawn(*SLOW, "--health-monitor", "true", "--data-parallel-size", "2")
    first, _ = server.engines()
    async with connect(server) as client:
        streams, running = await begin(client, 24, max_tokens=100)
        async with asyncio.timeout(10):
            while sum(stream.has_begun.is_set() for stream in streams) < 16:
                await asyncio.sleep(0.01)
        first.kill()
        begun = [stream.has_begun.is_set() for stream in streams]
        await running
    assert sum(begun) == 16, "the others wait in the engines' queues"
    assert [bool(stream.errors) for stream in streams].count(True) == 8
    assert not any(stream.errors for stream, has_begun in zip(streams, begun, strict=True) if not has_begun)


@pytest.mark.sweep
@pytest.mark.parametrize("at_once", [True, False])
def test_a_server_whose_engines_keep_dying_ends(spawn: Start, at_once: bool) -> None:
    """Five times within a minute; each time it waits longer. ``at_once``: before they are Python, between fork and
    exec as a rule.
    """
    server = spawn(*SLOW, "--health-monitor")
    helpers = {process.pid for process in server.children() if is_helper(process)}
    seen: set[int] = set()
    listed = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")

    def kill_what_comes() -> bool:
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            for pid in map(int, listed.read_text().split()):
                if pid not in seen | helpers and (at_once or time.time() - psutil.Process(pid).create_time() > 0.5):
                    seen.add(pid)
                    os.kill(pid, signal.SIGKILL)
        return not server.is_running

    until(kill_what_comes, 40, "the end", pause=0 if at_once else 0.01)
    assert server.wait(5) == 70
    assert len(seen) >= 5 if at_once else len(seen) == 5  # what engines are forked from is killed at once, too
    for delay in ("0.5", "1", "2", "4"):
        assert server.log.count(f"started again in {delay} seconds") == 1, server.log
    assert "died 5 times" in server.log
    assert "no engine can be kept alive" in server.log
    assert "Traceback" not in server.log
    assert not server.leftovers


def test_a_stopped_engine_does_not_outlive_a_killed_server(spawn: Start) -> None:
    """It cannot see that its parent is gone: the system wakes it."""
    server = spawn(*SLOW)
    server.signal_engine(signal.SIGSTOP)
    psutil.Process(server.process.pid).kill()
    server.process.wait(5)
    until(lambda: not is_alive(server.engine), 5, "the end of the engine")
    assert not server.leftovers


@pytest.mark.sweep
def test_what_compiles_grammars_is_started_before_the_first_and_only_where_there_are_any(spawn: Start) -> None:
    without = spawn("--grammar-backend", "none", forked=False)
    assert without.post(GOLDEN).status_code == 200
    server = spawn(forked=False)
    until(lambda: any(is_helper(process) for process in server.children()), 60, "its process for grammars")
    assert not any(is_helper(process) for process in without.children())
