"""Two engines behind one address: requests are spread, and one that dies takes only its own with it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

import fwk
from fwk.errors import ConfigError
from tests.helpers.client import Streamed, connect, together
from tests.helpers.rig import FAKE, Server, is_alive, until
from tests.helpers.servers import Shared, Start
from tests.helpers.zygote import run_fwk

TWO = (*FAKE, "--fake-step-ms", "20", "--data-parallel-size", "2")


def replicas(server: Server) -> list[dict[str, Any]]:
    return server.get("/server_info").json()["replicas"]


def finished(server: Server) -> list[int]:
    return [replica["stats"]["finished"] for replica in replicas(server)]


@pytest.fixture(scope="module")
def shared_pair(spawn: Start) -> Shared:
    return Shared(spawn, TWO)


@pytest.fixture
def pair(shared_pair: Shared) -> Server:
    return shared_pair.server()


@pytest.fixture(scope="module")
def shortest(spawn: Start) -> Server:
    return spawn(*TWO, "--load-balance-method", "shortest_queue")


async def test_requests_are_spread_and_their_tokens_right(pair: Server, fake: Server) -> None:
    assert pair.golden == fake.golden
    before = finished(pair)
    bodies = [{"prompt": f"number {i}", "max_tokens": 5 + i} for i in range(8)]
    async with connect(pair) as two, connect(fake) as one:
        found = await together([two.complete(**body) for body in bodies])
        expected = await together([one.complete(**body) for body in bodies])
    assert found == expected
    until(lambda: sum(finished(pair)) - sum(before) >= 8, 5, "reports of both")
    assert [after - then for after, then in zip(finished(pair), before, strict=True)] == [4, 4]
    assert pair.metric("fwk:generation_tokens_total") == sum(r["stats"]["generation_tokens"] for r in replicas(pair))
    pair.check_invariants()


@pytest.mark.sweep
async def test_conversations_stay_with_their_prefix(spawn: Start) -> None:
    """Of 6 conversations of 4 turns, all but the first turns find what the balancer says that they find."""
    server = spawn(*TWO, "--load-balance-method", "cache_aware")
    before = [replica["choices"] for replica in replicas(server)]
    cached = 0
    for turn in range(1, 5):
        for number in range(6):
            body = {"prompt": f"{number} {'so it goes on ' * 20 * turn}"[: 200 * turn], "max_tokens": 2}
            cached += server.post(body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    chosen = [replica["choices"] for replica in replicas(server)]
    found = [{name: now[name] - then[name] for name in now} for now, then in zip(chosen, before, strict=True)]
    assert [(each["prefix"], each["new"], each["behind"]) for each in found] == [(9, 3, 0)] * 2
    assert 0 < sum(each["cached_tokens"] for each in found) == cached


async def test_aborts_reach_the_right_engine(pair: Server) -> None:
    async with connect(pair) as client:
        streams = [Streamed() for _ in range(4)]
        work = [asyncio.ensure_future(client.stream(s, prompt=f"{i}", max_tokens=1500)) for i, s in enumerate(streams)]
        await asyncio.wait_for(asyncio.gather(*(s.has_begun.wait() for s in streams)), 20)
        assert [replica["num_open"] for replica in replicas(pair)] == [2, 2]
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
    until(lambda: [replica["num_open"] for replica in replicas(pair)] == [0, 0], 5, "all are forgotten")
    until(lambda: all(r["stats"]["num_running"] == 0 for r in replicas(pair)), 5, "no engine works on")
    pair.check_invariants()


@pytest.mark.sweep
async def test_the_shortest_queue_gets_the_request(shortest: Server) -> None:
    async with connect(shortest) as client:
        long = Streamed()
        running = asyncio.ensure_future(client.stream(long, prompt="long", max_tokens=1500, n=3))
        await asyncio.wait_for(long.has_begun.wait(), 20)
        [busy] = [index for index, replica in enumerate(replicas(shortest)) if replica["num_open"]]
        before = finished(shortest)
        for i in range(4):
            await client.complete(prompt=f"short {i}", max_tokens=3)
        until(lambda: sum(finished(shortest)) - sum(before) >= 4, 5, "reports")
        assert finished(shortest)[busy] == before[busy]
        running.cancel()
    shortest.check_invariants()


@pytest.mark.sweep
async def test_an_engine_that_dies_takes_only_its_own_requests_with_it(pair: Server, fake: Server) -> None:
    engines = pair.engines()
    assert len(engines) == 2
    async with connect(pair) as client, connect(fake) as one:
        streams = [Streamed() for _ in range(8)]
        work = [client.stream(s, prompt=f"stream {i}", max_tokens=100) for i, s in enumerate(streams)]
        running = asyncio.ensure_future(together(work))
        await asyncio.wait_for(asyncio.gather(*(s.has_begun.wait() for s in streams)), 20)
        engines[1].send_signal(signal.SIGKILL)
        await running
        failed = [stream for stream in streams if stream.errors]
        assert len(failed) == 4
        assert all("process was killed by signal 9 (SIGKILL)" in stream.errors[0]["message"] for stream in failed)
        expected = await together([one.complete(prompt=f"stream {i}", max_tokens=100) for i in range(8)])
        for stream, tokens in zip(streams, expected, strict=True):
            assert stream.is_done
            if not stream.errors:
                assert [stream.token_ids[0]] == tokens
        reply = pair.get("/health")
        assert reply.status_code == 200
        assert reply.json()["status"] == "degraded"
        assert reply.json()["reason"].startswith("engine ")
        assert sum(replica["trouble"] is not None for replica in replicas(pair)) == 1
        assert pair.log.count("dead: engine ") == 1
        again = await together([client.complete(prompt=f"stream {i}", max_tokens=100) for i in range(4)])
        assert again == expected[:4]
        until(pair.is_idle, 5, "gauges of the dead engine are gone")
    engines[0].send_signal(signal.SIGKILL)
    until(lambda: pair.health() == 503, 3, "health 503 without any engine")
    assert pair.post({"prompt": "Hi"}).status_code == 503
    assert pair.stop() == 0
    assert not pair.leftovers


@pytest.mark.sweep
async def test_an_engine_that_hangs_gets_no_requests_until_it_answers_again(spawn: Start) -> None:
    server = spawn(*TWO, "--ping-timeout", "1.5")
    hung = server.engines()[0]
    hung.send_signal(signal.SIGSTOP)
    until(lambda: server.get("/health").json()["status"] == "degraded", 5, "health degraded")
    async with connect(server) as client:
        for i in range(4):
            await asyncio.wait_for(client.complete(prompt=f"{i}", max_tokens=3), 10)
    hung.send_signal(signal.SIGCONT)
    until(lambda: server.get("/health").json()["status"] == "ok", 5, "health ok")
    engines = psutil.Process(server.process.pid).children()
    psutil.Process(server.process.pid).kill()
    server.process.wait(5)
    until(lambda: not any(map(is_alive, engines)), 5, "no engine outlives the server")
    assert not server.leftovers


@pytest.mark.sweep  # as tests/faults/test_start_up.py has of other options
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dp", "0"], "--data-parallel-size: Input should be greater than or equal to 1"),
        (["--dp-size", "65"], "--data-parallel-size: Input should be less than or equal to 64"),
        (
            ["--load-balance-method", "shortest"],
            "unknown load balancer 'shortest' (did you mean 'shortest_queue'?); installed: ",
        ),
    ],
)
def test_what_cannot_be_is_said_in_one_line(tiny_folder: Path, flags: list[str], message: str) -> None:
    done = run_fwk("serve", str(tiny_folder), "--load-format", "dummy", "--port", "0", *flags)
    assert done.returncode != 0
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_there_is_one_engine_without_a_server(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--data-parallel-size is for fwk serve: fwk\.LLM has no server"):
        fwk.LLM(str(tiny_folder), load_format="dummy", data_parallel_size=2)
