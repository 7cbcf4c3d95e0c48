"""Engines in actors of a Ray cluster: which run, what becomes of those that die, and the tokens of one engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.helpers.ports import free_port
from tests.helpers.ray_cluster import FakeRay, LocalCluster, engine_processes, local_cluster, needs_ray
from tests.helpers.rig import GOLDEN, Server, until, write_model

from fwk.errors import EngineDead
from fwk.interfaces.engine_pool import EnginePoolContext
from fwk_kit.testing.engine_pools import ScriptedPool, request
from fwk_pools.ray import RayEnginesOptions, relay
from fwk_pools.ray.pool import OFF, RayEngine


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ray_engine_address": "ray://head:10001"}, "an address for Ray Client"),
        ({"ray_engine_resources": {"CPU": 1}}, "CPU has an option of its own"),
        ({"ray_engine_resources": {"node": 0}}, "0 of node cannot be reserved"),
        ({"ray_min_engines": 1}, "needs --data-parallel-backend ray"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RayEnginesOptions(**options)


def engines(count: int, **options: Any) -> list[RayEngine]:
    """The engines of one model, with scripted ones below."""
    shared: dict[str, Any] = {}
    given = RayEnginesOptions(data_parallel_backend="ray", **options)
    return [RayEngine(EnginePoolContext(ScriptedPool, lambda *_: None, given, shared=shared)) for _ in range(count)]


async def started(count: int, **options: Any) -> list[RayEngine]:
    every = engines(count, **options)
    for one in every:
        await one.start()
    for one in every:
        await one.wait_ready()
    return every


async def soon(condition: Any) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("not in time")


def on(every: list[RayEngine]) -> list[bool]:
    return [one.trouble() is None for one in every]


async def test_all_run_unless_told_otherwise() -> None:
    every = await started(3)
    assert on(every) == [True] * 3
    every[0].submit(request("a"), lambda news: None)
    every[0].forget("a")
    await asyncio.sleep(0.02)
    assert on(every) == [True] * 3


async def test_engines_are_started_while_requests_queue_and_stopped_once_they_have_ended() -> None:
    options = {"ray_min_engines": 1, "ray_target_requests": 2, "ray_upscale_delay": 0.01, "ray_downscale_delay": 0.01}
    every = await started(3, **options)
    assert on(every) == [True, False, False]
    assert every[1].trouble() == OFF
    with pytest.raises(EngineDead):
        every[1].submit(request("x"), lambda news: None)
    for name in ("a", "b"):
        every[0].submit(request(name), lambda news: None)
    await asyncio.sleep(0.05)
    assert on(every) == [True, False, False], "two are the target"
    every[0].submit(request("c", 3), lambda news: None)
    await soon(lambda: on(every) == [True, True, True])  # five sequences, of two each
    last: Any = every[2].below[0]
    every[2].submit(request("d"), lambda news: None)
    for name in ("a", "b", "c"):
        every[0].forget(name)
    await soon(lambda: not every[2].is_on)
    assert last.is_running, "its request is under way"
    assert every[2].engines
    every[2].forget("d")
    await soon(lambda: not last.is_running)
    await soon(lambda: on(every) == [True, False, False])
    await asyncio.sleep(0.05)
    assert [told["is_on"] for one in every for told in one.info()] == [True, False, False]
    for one in every:
        await one.close()


async def test_a_peak_is_no_reason_to_start_one() -> None:
    every = await started(2, ray_min_engines=1, ray_target_requests=1, ray_upscale_delay=0.2)
    for name in ("a", "b"):
        every[0].submit(request(name), lambda news: None)
    every[0].forget("a")
    await asyncio.sleep(0.3)
    assert on(every) == [True, False]
    await every[0].close()


async def test_one_that_cannot_be_started_is_tried_again() -> None:
    options = {"ray_min_engines": 1, "ray_target_requests": 1, "ray_upscale_delay": 0.01}
    every = await started(2, **options)
    below: Any = every[1].below[0]
    start_again, tries = below.start_again, []

    async def fails_once() -> Any:
        tries.append(1)
        if len(tries) == 1:
            raise EngineDead("no place")
        return await start_again()

    below.start_again = fails_once
    for name in ("a", "b"):
        every[0].submit(request(name), lambda news: None)
    await soon(lambda: on(every) == [True, True])
    assert len(tries) == 2
    for one in every:
        await one.close()


@pytest.mark.parametrize(
    ("engine", "plugin_options", "message"),
    [
        ({"executor": "ray"}, {}, "--executor ray their ranks"),
        ({}, {"features.media": {"enable_multimodal": True}}, "--enable-multimodal"),
        ({}, {"features.remote_prefill": {"disaggregation_mode": "decode"}}, "--disaggregation-mode"),
    ],
)
def test_what_needs_the_engine_here_is_refused(
    engine: dict[str, Any], plugin_options: dict[str, Any], message: str
) -> None:
    config = {"engine": {"executor": "auto", **engine}, "plugin_options": plugin_options}
    with pytest.raises(EngineDead, match=message):
        relay.check(config)
    relay.check({"engine": {"executor": "processes"}, "plugin_options": {}})


def test_a_cluster_that_was_killed_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray keeps the address of one that was not stopped, and tries it for minutes."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    address = f"127.0.0.1:{free_port()}"
    ray = FakeRay(address)
    with pytest.raises(EngineDead) as caught:
        relay._connect(ray, "auto")
    assert str(caught.value) == (
        f"no Ray cluster can be joined at {address}, where Ray knows one of this machine (--ray-engine-address auto): "
        "Connection refused; start one (`ray stop`, then `ray start --head`), or give the address of one that runs "
        "(--ray-engine-address HOST:PORT)"
    )
    assert not ray.num_tries


@pytest.mark.parametrize("is_remembered", [True, False])
def test_a_cluster_that_does_not_answer_is_waited_for_with_words(
    is_remembered: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(relay, "SAY_SECONDS", 0.05)
    monkeypatch.setattr(relay, "JOIN_SECONDS", 0.3)
    kept = signal.getsignal(signal.SIGALRM)
    with socket.create_server(("127.0.0.1", 0)) as silent, caplog.at_level("INFO", "fwk.engine"):
        ray = FakeRay(f"127.0.0.1:{silent.getsockname()[1]}" if is_remembered else "")
        with pytest.raises(EngineDead, match=r"this machine has not answered for 0\.3 seconds; run `ray start --head`"):
            relay._connect(ray, "auto")
    assert ray.num_tries
    assert caplog.messages[0] == "joining the Ray cluster on this machine"
    assert "waiting for the Ray cluster on this machine to answer, for 0 seconds so far" in caplog.messages
    assert signal.getsignal(signal.SIGALRM) == kept


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(2) as found:
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def server(cluster: LocalCluster, model: Path) -> Iterator[Server]:
    flags = ("--data-parallel-size", "2", "--data-parallel-backend", "ray", "--ray-engine-address", cluster.address)
    one = Server(model, *flags, "--health-monitor", "true", "--replica-slow-start", "0", forked=False)
    one.wait_ready()
    yield one
    one.close()


class Streams:
    """Requests under way: of each its tokens, and whether it ended as it should."""

    def __init__(self, url: str, count: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.ends = [""] * count
        self._threads = [threading.Thread(target=self._run, args=(url, index)) for index in range(count)]
        for thread in self._threads:
            thread.start()

    def all_run(self) -> bool:
        return all(tokens or end for tokens, end in zip(self.tokens, self.ends, strict=True))

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a stream hangs"

    def _run(self, url: str, index: int) -> None:
        body = {"prompt": f"Stream {index % 2}", "max_tokens": 600, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True}
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
                for line in reply.iter_lines():
                    data = line.removeprefix("data: ")
                    if data == "[DONE]":
                        self.ends[index] = self.ends[index] or "done"
                    elif data.startswith("{"):
                        event = json.loads(data)
                        self.ends[index] = self.ends[index] or ("error" if "error" in event else "")
                        self.tokens[index] += event["choices"][0]["token_ids"] if "choices" in event else []
        except httpx.HTTPError:
            self.ends[index] = self.ends[index] or "error"


def golden(server: Server) -> list[int]:
    reply = httpx.post(f"{server.url}/v1/completions", json=GOLDEN, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["token_ids"]


def num_able(server: Server) -> int:
    return sum(told["trouble"] is None for told in httpx.get(f"{server.url}/server_info").json()["replicas"])


@needs_ray
@pytest.mark.sweep
@pytest.mark.timeout(400)
def test_an_actor_and_a_node_that_die_take_their_own_requests_alone(
    cluster: LocalCluster, server: Server, model: Path
) -> None:
    """The tokens are those of one engine on this machine; others' streams continue; engines come back elsewhere."""
    alone = Server(model)
    alone.wait_ready()
    wanted = golden(alone)
    whole = Streams(alone.url, 2)
    whole.join()
    alone.close()
    assert [golden(server) for _ in range(4)] == [wanted] * 4

    for die in ("actor", "raylet"):
        streams = Streams(server.url, 8)
        until(streams.all_run, 20, "they run")
        if die == "actor":
            engine = engine_processes()[0]
            parent = engine.parent()
            assert parent is not None
            os.kill(parent.pid, signal.SIGKILL)
        else:
            spare = cluster.add()
            cluster.kill(cluster.nodes.pop(0))
            cluster.nodes.append(spare)
        streams.join()
        assert streams.ends.count("done") >= 4, f"{die}: {streams.ends}"
        for index, (tokens, end) in enumerate(zip(streams.tokens, streams.ends, strict=True)):
            assert end in ("done", "error")
            reference = whole.tokens[index % 2]
            assert tokens == (reference if end == "done" else reference[: len(tokens)])
        until(lambda: num_able(server) == 2, 40, f"after the {die}'s end both serve again", pause=0.2)
        assert [golden(server) for _ in range(4)] == [wanted] * 4
    until(lambda: len(engine_processes()) == 2, 20, "nothing is left of those that were lost")
    server.process.terminate()
    server.process.wait(20)
    until(lambda: not engine_processes(), 20, "engines end with their server")
