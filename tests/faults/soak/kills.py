"""SIGKILL of one process under 16 streams, round after round: ``python -m tests.faults.soak.kills --rounds 20``.

A rank of two, the registry, the prefill server, the decode server, SGLang's and vLLM's routers, and of a Ray cluster an
actor, a raylet and the head are killed in turn. In each round every stream ends within its time, with the tokens of a
server on which nothing died or with an error; then the servers are well again, nothing runs, and no block is held. etcd
is the registry where it is installed, and what else is not installed is told. Engines and replicas are killed in
``tests.faults.soak.deaths``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp
import httpx
import psutil

from tests.faults.soak.deaths import FAILED, Place, free_port
from tests.helpers.etcd_server import MISSING, EtcdServer, is_missing
from tests.helpers.ray_cluster import LocalCluster, engine_processes, local_cluster, missing
from tests.helpers.rig import assert_no_leak, until, write_model
from tests.helpers.routers import ROUTERS, Router, python_of

NUM_STREAMS = 16
NUM_TOKENS = 300
STREAM_SECONDS = 120.0
WELL_SECONDS = 60.0
KEPT_SECONDS = 45.0
"""In which K/V that a killed router has asked for, and told no server of, are let go: ``--disaggregation-timeout``."""

HEADLESS_SECONDS = 100.0
"""More than the minute for which Ray's processes wait for their head."""

DEATHS_APART = 16.0
"""Seconds between deaths of an engine: with five within a minute its server gives up, as it should."""

GIVEN_UP = "and is not started again"
OF_ENGINES = ("rank", "actor", "raylet")
NAMES = ("rank", "registry", "prefill", "decode", *ROUTERS, "actor", "raylet", "head")
PROMPTS = tuple(f"{i}: {'The quick brown fox jumps over the lazy dog. ' * (1 + i % 3)}" for i in range(NUM_STREAMS))


async def stream(place: Place, prompt: str, salt: str = "", url: str = "") -> str | None:
    """The text of a stream that ended well; None of one that failed, and said so or broke off. url: of a router."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    body |= {"cache_salt": salt} if salt else {}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(STREAM_SECONDS)) as session,
            session.post(f"{url or place.server.url}/v1/completions", json=body) as reply,
        ):
            data = await reply.read()
    except TimeoutError:
        raise AssertionError(f"a stream of {place.name} hangs") from None
    except FAILED:
        return None
    assert_no_leak(data.decode(errors="replace"))
    if reply.status != 200 or b'"error"' in data or not data.endswith(b"data: [DONE]\n\n"):
        return None
    lines = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
    return "".join(line["choices"][0]["text"] for line in lines if line["choices"])


@dataclass
class Victim:
    """What is killed, and the server whose streams it may cost. spares: it may cost none.

    url: at which streams are asked for, where it is not that server's. seconds: for blocks to come back.
    """

    name: str
    place: Place
    others: tuple[Place, ...]
    kill: Callable[[], Coroutine[object, object, None]]
    spares: bool = False
    url: str = ""
    seconds: float = 10.0
    counts: Counter[str] = field(default_factory=Counter)


async def one_round(victim: Victim, expected: list[str | None], dice: random.Random, salt: str) -> None:
    """Raises ``AssertionError`` for what does not hold."""
    streams = [asyncio.create_task(stream(victim.place, prompt, salt, victim.url)) for prompt in PROMPTS]
    await asyncio.sleep(dice.uniform(0.0, 0.25))
    kill = asyncio.create_task(victim.kill())
    found = await asyncio.gather(*streams)
    await kill
    for text, wanted in zip(found, expected, strict=True):
        assert text in (None, wanted), f"{text!r}, not {wanted!r}"
    victim.counts["served"] += sum(text is not None for text in found)
    victim.counts["failed"] += sum(text is None for text in found)
    assert not victim.spares or None not in found, f"{found.count(None)} streams failed"
    end = time.monotonic() + WELL_SECONDS
    while victim.others and not is_well(victim.place) and time.monotonic() < end:
        await stream(victim.place, PROMPTS[2], f"{salt} {end - time.monotonic()}")  # /health tells the last transfer
    for place in (*victim.others, victim.place):
        await place.well(WELL_SECONDS)
        await asyncio.to_thread(until, place.server.is_idle, 10, f"nothing runs on {place.name}", 0.1)
        await asyncio.to_thread(
            until, lambda place=place: is_whole(place), victim.seconds, f"no block is held on {place.name}", 0.1
        )


def is_well(place: Place) -> bool:
    """Whether /health misses nothing."""
    return place.server.get("/health").text == '{"status":"ok"}'


def is_whole(place: Place) -> bool:
    """Whether no block is held and no transfer is under way."""
    transfers = ("fwk:num_kv_fetching", "fwk:num_kv_offered") if place.name in ("prefill", "decode") else ()
    return not place.server.metric("fwk:kv_cache_usage_perc") and not any(map(place.server.metric, transfers))


async def rank(place: Place, dice: random.Random) -> None:
    place.hurt()
    count = place.server.log.count("serves again")
    ranks = [child for child in place.server.engines()[0].children() if child.is_running()]
    dice.choice(ranks).send_signal(signal.SIGKILL)
    await asyncio.to_thread(
        until, lambda: place.server.log.count("serves again") > count, WELL_SECONDS, "an engine", 0.1
    )


async def server(place: Place) -> None:
    place.hurt()
    await place.restart()


async def registry(etcd: EtcdServer) -> None:
    await asyncio.to_thread(etcd.stop)
    await asyncio.sleep(1)
    await asyncio.to_thread(etcd.start)


def actor(place: Place, dice: random.Random) -> None:
    """The process of Ray's in which an engine's process was started."""
    place.hurt()
    parent = dice.choice(engine_processes()).parent()
    assert parent is not None
    parent.kill()


async def raylet(cluster: LocalCluster, place: Place, dice: random.Random) -> None:
    """All of a node, as a machine that is switched off; there is one more than engines need, and then another joins."""
    place.hurt()
    await asyncio.to_thread(cluster.kill, cluster.nodes.pop(dice.randrange(len(cluster.nodes))))
    await asyncio.to_thread(until, place.server.is_idle, STREAM_SECONDS, "the end of the streams", 0.2)
    cluster.nodes.append(cluster.add())  # Ray starts nodes in the main thread alone


def has_ended_or(place: Place, condition: Callable[[], bool]) -> bool:
    with suppress(httpx.HTTPError):  # it is ending
        return place.has_ended or condition()
    return False


async def head(cluster: LocalCluster, place: Place) -> None:
    """The node that others register at. Once the engines have ended, which Ray has them do, there is another.

    Of an engine that could not be started five times meanwhile the log says that it is not started again, and without
    any the server ends: then it is started again here.
    """
    place.hurt()
    await asyncio.to_thread(cluster.kill_head)
    started, found = time.monotonic(), ""
    while found is not None:
        since = time.monotonic() - started
        assert since < HEADLESS_SECONDS, "engines outlive their cluster"
        found = await stream(place, PROMPTS[0], f"{since}")
        took = time.monotonic() - started - since
        print(f"{since:.0f} s without a head: {'no' if found is None else 'a'} text after {took:.1f} s")
        await asyncio.sleep(5)
    idle = partial(has_ended_or, place, lambda: place.server.is_idle())
    await asyncio.to_thread(until, idle, STREAM_SECONDS, "the end of the streams", 0.2)
    cluster.start_head()
    for node in list(cluster.nodes):
        await asyncio.to_thread(cluster.kill, node)
        cluster.nodes.remove(node)
        cluster.nodes.append(cluster.add())
    settled = partial(has_ended_or, place, lambda: is_well(place) or GIVEN_UP in place.server.log)
    await asyncio.to_thread(until, settled, WELL_SECONDS, "it serves again, or says that it does not", 0.2)
    if place.has_ended or GIVEN_UP in place.server.log:
        print("an engine was given up, and the server is started again")
        await (place.start_again() if place.has_ended else place.restart())


async def run(victims: list[Victim], rounds: int, seed: int) -> int:
    """How many rounds did not hold."""
    dice, num_bad = random.Random(seed), 0
    for victim in victims:
        expected = [await stream(victim.place, prompt, url=victim.url) for prompt in PROMPTS]
        assert None not in expected
        print(f"{victim.name}: {sum(len(text or '') for text in expected)} characters without a death", flush=True)
        for number in range(rounds):
            started, told = time.monotonic(), "held"
            try:
                await one_round(victim, expected, dice, f"{victim.name} {number}")
            except (AssertionError, OSError, httpx.HTTPError, psutil.Error) as error:
                num_bad, told = num_bad + 1, f"WRONG: {type(error).__name__} {error!s:.300}"
            took = time.monotonic() - started
            print(f"{victim.name} {number}: {told} after {took:.1f} s; {dict(victim.counts)}", flush=True)
            if victim.name in OF_ENGINES:
                await asyncio.sleep(DEATHS_APART - took)
    return num_bad


class Servers:
    """What is started for the victims that are asked for, and ended after them."""

    def __init__(self, folder: Path, dice: random.Random, only: list[str]) -> None:
        self._model, self._folder, self._dice = write_model(folder / "model"), folder, dice
        self._only = only
        self._stack = ExitStack()
        self.victims: list[Victim] = []

    def _wants(self, *names: str) -> bool:
        return not self._only or bool({*names} & {*self._only})

    def _place(self, name: str, *flags: str, port: int = 0, forked: bool = True) -> Place:
        place = Place(name, self._model, self._folder, *flags, port=port, forked=forked)
        self._stack.callback(lambda: place.server.close())
        return place

    def start(self) -> None:
        if self._wants("rank"):
            ranks = self._place("ranks", "--tp-size", "2")
            self.victims.append(Victim("rank", ranks, (), lambda: rank(ranks, self._dice)))
        if self._wants("registry", "prefill", "decode", *ROUTERS):
            self._disaggregated()
        if self._wants("actor", "raylet", "head"):
            if (why := missing()) is not None:
                print(f"nothing of Ray is killed: {why}")
            else:
                self._on_ray()
        self.victims = [victim for victim in self.victims if self._wants(victim.name)]

    def _disaggregated(self) -> None:
        etcd = None if is_missing() else EtcdServer()
        if etcd is None:
            print(f"the registry is a file, and not killed: it {MISSING}")
        else:
            self._stack.callback(etcd.stop)
        secret = self._folder / "secret"
        secret.write_bytes(self._dice.randbytes(32).hex().encode())
        named = ("--disaggregation-registry", etcd.url if etcd else f"file://{self._folder}")
        shared = (*named, "--disaggregation-registry-lease", "2", "--disaggregation-token-file", str(secret))
        port = free_port()
        own = ("--disaggregation-mode", "prefill", "--disaggregation-advertise-url", f"http://127.0.0.1:{port}")
        prefill = self._place("prefill", *shared, *own, port=port)
        own = ("--disaggregation-mode", "decode", "--disaggregation-min-prompt-tokens", "64")
        decode = self._place("decode", *shared, *own)
        if etcd is not None:
            self.victims.append(Victim("registry", decode, (prefill,), lambda: registry(etcd), spares=True))
        self.victims += [
            Victim("prefill", decode, (prefill,), lambda: server(prefill), spares=True),
            Victim("decode", decode, (prefill,), lambda: server(decode)),
        ]
        for package in ROUTERS:
            if not self._wants(package):
                continue
            if not python_of(package).exists():
                made = "pytest -n 0 -m clients tests/clients/test_routers.py makes it"
                print(f"{package} is not killed: there is no {python_of(package)}; {made}")
                continue
            one = Router(package, prefill.server.url, decode.server.url, self._folder)
            self._stack.callback(one.close)
            kill = lambda one=one: asyncio.to_thread(one.restart)  # noqa: E731
            self.victims.append(Victim(package, decode, (prefill,), kill, url=one.url, seconds=KEPT_SECONDS))

    def _on_ray(self) -> None:
        cluster = self._stack.enter_context(local_cluster(3))
        flags = ("--dp-size", "2", "--data-parallel-backend", "ray", "--ray-engine-address", cluster.address)
        place = self._place("ray", *flags, "--replica-slow-start", "0", forked=False)
        self.victims += [
            Victim("actor", place, (), lambda: asyncio.to_thread(actor, place, self._dice)),
            Victim("raylet", place, (), lambda: raylet(cluster, place, self._dice)),
            Victim("head", place, (), lambda: head(cluster, place)),
        ]

    def close(self) -> None:
        self._stack.close()


def main() -> int:
    """The exit code is 1 when anything did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak.kills", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], help=f"of {', '.join(NAMES)}")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fwk-kills-"))
    servers = Servers(folder, random.Random(args.seed), args.only)
    try:
        servers.start()
        num_bad = asyncio.run(run(servers.victims, args.rounds, args.seed))
        print("\n".join(f"{victim.name}: {dict(victim.counts)}" for victim in servers.victims))
    finally:
        servers.close()
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
