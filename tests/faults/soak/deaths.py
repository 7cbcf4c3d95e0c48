"""Deaths of every process in turn, under load: ``python -m tests.faults.soak.deaths --seconds 1800 --every 60``.

Two servers take the load: one of two replicas, and a decode server with a prefill server of its own. API process,
helper, engine, replica, prefill and decode server are killed in turn, and what died comes back. What was sent to
others, or before or after, is served; what was accepted (batches, background responses) ends, each once; every answer
is that of the first start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tests.helpers.rig import Server, assert_no_leak, forks_engines, is_alive, is_helper, until, write_model

BACK_SECONDS = 30.0
END_SECONDS = 120.0
TEXT = "The quick brown fox jumps over the lazy dog. "
PROMPTS = tuple(f"{number}: {TEXT * (1 + 5 * (number % 2))}" for number in range(12))
"""Short ones, and ones long enough that a prefill server computes them."""

NUM_TOKENS = 40
BATCH_LINES = 24
COMMON = (
    "--health-monitor", "--watchdog-timeout", "15", "--ping-timeout", "3", "--max-running-requests", "16",
    "--batch-concurrency", "4", "--dtype", "float32",
)  # fmt: skip
FAILED = (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError, TimeoutError)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Place:
    """A server that comes back at its own address, with its own files, after its API process was killed."""

    def __init__(self, name: str, model: Path, folder: Path, *flags: str, port: int = 0, forked: bool = True) -> None:
        self.name = name
        self._model = model
        self._forked = forked
        self._flags = (*COMMON, "--port", str(port or free_port()), "--files-dir", str(folder / name), *flags)
        self.num_deaths = 0
        self.is_hurt = False
        self.server = self._new()

    def _new(self) -> Server:
        server = Server(self._model, *self._flags, forked=self._forked)
        server.wait_ready()
        return server

    def hurt(self) -> None:
        """From now on, requests may fail, until it is ``well``."""
        self.num_deaths += 1
        self.is_hurt = True

    async def restart(self) -> None:
        """Kill the API process; what it began ends with it; start another."""
        dead = self.server
        processes = [dead.process.pid, *(child.pid for child in dead.children())]
        dead.process.kill()
        await asyncio.to_thread(until, lambda: not any(map(_runs, processes)), 5, "the end of what it started")
        print(f"--- {self.name} was killed; the end of its log:\n{dead.log[-1500:]}", file=sys.stderr)
        await asyncio.to_thread(dead.close)
        self.server = await asyncio.to_thread(self._new)

    @property
    def has_ended(self) -> bool:
        return self.server.process.poll() is not None

    async def start_again(self) -> None:
        """Another in the place of one that has ended by itself."""
        await asyncio.to_thread(self.server.close)
        self.server = await asyncio.to_thread(self._new)

    async def well(self, seconds: float = BACK_SECONDS) -> None:
        """Wait until it serves again, all of it."""
        done = lambda: self.server.get("/health").text == '{"status":"ok"}'  # noqa: E731
        await asyncio.to_thread(until, done, seconds, f"{self.name} is well again", 0.1)
        self.is_hurt = False


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and is_alive(psutil.Process(pid))


@dataclass(slots=True)
class Site:
    """The servers, and what they were asked for."""

    replicas: Place
    prefill: Place
    decode: Place
    texts: dict[str, str] = field(default_factory=dict)  # what each prompt is answered with
    outcomes: Counter[str] = field(default_factory=Counter)
    troubles: list[str] = field(default_factory=list)
    batches: list[tuple[Place, str]] = field(default_factory=list)
    background: list[tuple[Place, str, str]] = field(default_factory=list)  # with its prompt

    def wrong(self, what: str) -> None:
        """Something that must not be."""
        self.outcomes["wrong"] += 1
        self.troubles.append(what)
        print(f"WRONG: {what}", file=sys.stderr)

    def check(self, place: Place, prompt: str, text: str) -> None:
        """An answer is that of the first start."""
        if text == self.texts[prompt]:
            self.outcomes["served"] += 1
        else:
            self.wrong(f"{place.name} says {text!r} after {prompt[:10]!r}, not {self.texts[prompt]!r}")


def _body(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}


async def _post(session: aiohttp.ClientSession, place: Place, path: str, **given: Any) -> tuple[int, bytes]:
    async with session.post(place.server.url + path, **given) as reply:
        data = await reply.read()
        assert_no_leak(data.decode(errors="replace"))
        return reply.status, data


async def completion(site: Site, place: Place, session: aiohttp.ClientSession, prompt: str) -> int:
    status, data = await _post(session, place, "/v1/completions", json=_body(prompt))
    if status == 200:
        site.check(place, prompt, json.loads(data)["choices"][0]["text"])
    return status


async def stream(site: Site, place: Place, session: aiohttp.ClientSession, prompt: str) -> int:
    """A stream that ends early counts as failed, and must say so, or break off without its end."""
    status, data = await _post(session, place, "/v1/completions", json=_body(prompt) | {"stream": True})
    if status != 200:
        return status
    if b'"error"' in data or not data.endswith(b"data: [DONE]\n\n"):
        return 503
    lines = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
    site.check(place, prompt, "".join(line["choices"][0]["text"] for line in lines if line["choices"]))
    return status


async def grammar(site: Site, place: Place, session: aiohttp.ClientSession, prompt: str) -> int:
    """One that is new to the helper."""
    digits = random.randrange(10**6)
    body = _body(prompt) | {"structured_outputs": {"choice": [f"a{digits}", f"b{digits}"]}}
    status, data = await _post(session, place, "/v1/completions", json=body)
    if status == 200:
        text = json.loads(data)["choices"][0]["text"]
        if text not in (f"a{digits}", f"b{digits}"):
            site.wrong(f"{place.name} says {text!r}, which its grammar rules out")
        site.outcomes["served"] += 1
    return status


async def response(site: Site, place: Place, session: aiohttp.ClientSession, prompt: str) -> int:
    """One in the background, which ends whatever dies."""
    asked = {"input": prompt, "background": True, "max_output_tokens": NUM_TOKENS, "temperature": 0}
    status, data = await _post(session, place, "/v1/responses", json=asked)
    if status == 200:
        site.background.append((place, json.loads(data)["id"], prompt))
    return status


async def batch(site: Site, place: Place, session: aiohttp.ClientSession, prompt: str) -> int:
    """A batch of all prompts, twice."""
    del prompt
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": _body(PROMPTS[i % len(PROMPTS)])}
        for i in range(BATCH_LINES)
    ]
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", "\n".join(map(json.dumps, lines)), filename="lines.jsonl")
    status, data = await _post(session, place, "/v1/files", data=form)
    if status != 200:
        return status
    asked = {"input_file_id": json.loads(data)["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    status, data = await _post(session, place, "/v1/batches", json=asked)
    if status == 200:
        site.batches.append((place, json.loads(data)["id"]))
    return status


KINDS = (*[completion] * 6, *[stream] * 6, grammar, grammar, response, batch)


async def work(site: Site, dice: random.Random, pause: float) -> None:
    """One client after another, for ever."""
    while True:
        await asyncio.sleep(dice.expovariate(1 / pause))
        place, kind = dice.choice((site.replicas, site.decode)), dice.choice(KINDS)
        was_hurt, deaths = place.is_hurt, place.num_deaths
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(END_SECONDS)) as session:
                status = await kind(site, place, session, dice.choice(PROMPTS))
            told = str(status)
        except FAILED as error:
            status, told = 503, f"{type(error).__name__} {error}"
        if status == 429:
            site.outcomes["refused"] += 1
        elif status != 200 and (was_hurt or place.num_deaths > deaths) and status in (500, 503):
            site.outcomes["failed with its server"] += 1
        elif status != 200:
            site.wrong(f"{kind.__name__} of {place.name}: {told}")


async def api_process(site: Site) -> None:
    site.replicas.hurt()
    await site.replicas.restart()
    await site.replicas.well()


async def helper(site: Site) -> None:
    """Requests whose grammar it compiles may fail; another is started for the next."""
    site.replicas.hurt()
    for one in psutil.Process(site.replicas.server.process.pid).children():
        if is_helper(one):
            one.kill()
    await asyncio.sleep(1)
    await site.replicas.well()


async def _engine(place: Place) -> None:
    place.hurt()
    count, [first, *_] = place.server.log.count("serves again"), place.server.engines()
    first.kill()
    await asyncio.to_thread(
        until, lambda: place.server.log.count("serves again") > count, BACK_SECONDS, "another engine", 0.1
    )
    await place.well()


async def engine(site: Site) -> None:
    await _engine(site.decode)


async def replica(site: Site) -> None:
    await _engine(site.replicas)


async def forks(site: Site) -> None:
    """What engines are forked from: it costs no request, and the next engine is there all the same."""
    for one in psutil.Process(site.replicas.server.process.pid).children():
        if forks_engines(one):
            one.kill()


async def prefill_server(site: Site) -> None:
    """Costs the decode server computation, and no request."""
    site.prefill.hurt()
    await site.prefill.restart()
    await site.prefill.well()
    await site.decode.well(BACK_SECONDS * 2)


async def decode_server(site: Site) -> None:
    site.decode.hurt()
    await site.decode.restart()
    await site.decode.well()


DEATHS: tuple[Callable[[Site], Awaitable[None]], ...] = (
    replica, prefill_server, api_process, forks, replica, helper, engine, decode_server,
)  # fmt: skip


async def run(site: Site, seconds: float, every: float, rate: float, seed: int) -> None:
    """The load, and the deaths; then all that was accepted must end."""
    dice = random.Random(seed)
    async with aiohttp.ClientSession() as session:
        for prompt in PROMPTS:
            _, data = await _post(session, site.replicas, "/v1/completions", json=_body(prompt))
            site.texts[prompt] = json.loads(data)["choices"][0]["text"]
    workers = [asyncio.create_task(work(site, random.Random(dice.random()), 6 / rate)) for _ in range(6)]
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        started, death = time.monotonic(), DEATHS[number % len(DEATHS)]
        try:
            await death(site)
        except (AssertionError, OSError, psutil.Error) as error:
            site.wrong(f"{death.__name__}: {type(error).__name__} {error!s:.300}")
        took = time.monotonic() - started
        print(f"{death.__name__}: well again after {took:.1f} s; {dict(site.outcomes)}", flush=True)
        await asyncio.sleep(max(1.0, every - took))
        number += 1
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    await asyncio.to_thread(settle, site)


def settle(site: Site) -> None:
    """Everything accepted ends, whole, once, and right."""
    for place, name, prompt in site.background:
        ended = lambda place=place, name=name: place.server.get(f"/v1/responses/{name}").json().get("status") not in (  # noqa: E731
            "queued", "in_progress",
        )  # fmt: skip
        until(ended, END_SECONDS, f"the end of {name}", 0.1)
        told = place.server.get(f"/v1/responses/{name}").json()
        if told.get("status") not in ("completed", "incomplete"):
            site.wrong(f"response {name} of {place.name} after {prompt[:10]!r}: {json.dumps(told)[:300]}")
        else:
            site.outcomes["background served"] += 1
    for place, name in site.batches:
        done = lambda place=place, name=name: place.server.get(f"/v1/batches/{name}").json().get("status") in (  # noqa: E731
            "completed", "failed", "expired", "cancelled", None,
        )  # fmt: skip
        until(done, END_SECONDS, f"the end of {name}", 0.1)
        told = place.server.get(f"/v1/batches/{name}").json()
        counts = {"total": BATCH_LINES, "completed": BATCH_LINES, "failed": 0}
        if told.get("status") != "completed" or told["request_counts"] != counts:
            site.wrong(f"batch {name} of {place.name}: {json.dumps(told)[:400]}")
            continue
        lines = place.server.get(f"/v1/files/{told['output_file_id']}/content").text.splitlines()
        if torn := [line for line in lines if not _is_json(line)]:
            site.wrong(f"batch {name} of {place.name}: lines of its output are no JSON: {torn!r:.3000}")
            continue
        told_ids = sorted(int(json.loads(line)["custom_id"]) for line in lines)
        if told_ids != list(range(BATCH_LINES)):
            site.wrong(f"batch {name} of {place.name}: its output has the lines {told_ids}")
        for line in map(json.loads, lines):
            prompt = PROMPTS[int(line["custom_id"]) % len(PROMPTS)]
            site.check(place, prompt, line["response"]["body"]["choices"][0]["text"])
        site.outcomes["batches whole"] += 1


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def main() -> int:
    """The exit code is 1 when anything did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak.deaths", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--every", type=float, default=60, help="seconds from one death to the next")
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spare-engines", type=int, default=1, help="as each server has it")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fwk-deaths-"))
    secret = folder / "secret"
    secret.write_bytes(random.randbytes(32).hex().encode())
    model = write_model(folder / "model")
    spare = ("--spare-engines", str(args.spare_engines))
    shared = (*spare, "--disaggregation-token-file", str(secret), "--disaggregation-mode")
    places: list[Place] = []
    try:
        places.append(Place("replicas", model, folder, *spare, "--dp-size", "2"))
        places.append(Place("prefill", model, folder, *shared, "prefill"))
        peer = ("--disaggregation-prefill-servers", places[-1].server.url, "--disaggregation-min-prompt-tokens", "64")
        places.append(Place("decode", model, folder, *shared, "decode", *peer))
        site = Site(places[0], places[1], places[2])
        asyncio.run(run(site, args.seconds, args.every, args.rate, args.seed))
        for place in places:
            if (code := place.server.stop()) != 0:
                site.wrong(f"{place.name} ended with {code}")
    finally:
        for place in places:
            place.server.close()
        shutil.rmtree(folder, ignore_errors=True)
    print(dict(site.outcomes))
    print("\n".join(site.troubles) or "all of it held")
    return 1 if site.troubles else 0


if __name__ == "__main__":
    sys.exit(main())
