"""SIGKILL of one process under 16 streams, round after round: ``python -m tests.faults.soak.kills --rounds 20``.

A rank of two, the registry, the prefill server and the decode server are killed in turn. In each round every stream
ends within its time, with the tokens of a server on which nothing died or with an error; then the servers are well
again, nothing runs, and no block is held. etcd is the registry where it is installed. A raylet is killed in
``tests/plugins/pools/test_ray.py``, engines and replicas in ``tests.faults.soak.deaths``.
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
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil

from tests.faults.soak.deaths import FAILED, Place, free_port
from tests.helpers.etcd_server import MISSING, EtcdServer, is_missing
from tests.helpers.rig import assert_no_leak, until, write_model

NUM_STREAMS = 16
NUM_TOKENS = 300
STREAM_SECONDS = 120.0
WELL_SECONDS = 60.0
PROMPTS = tuple(f"{i}: {'The quick brown fox jumps over the lazy dog. ' * (1 + i % 3)}" for i in range(NUM_STREAMS))


async def stream(place: Place, prompt: str, salt: str = "") -> str | None:
    """The text of a stream that ended well; None of one that failed, and said so or broke off."""
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True, "ignore_eos": True}
    body |= {"cache_salt": salt} if salt else {}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(STREAM_SECONDS)) as session,
            session.post(f"{place.server.url}/v1/completions", json=body) as reply,
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
    """What is killed, and the server whose streams it may cost. spares: it may cost none."""

    name: str
    place: Place
    others: tuple[Place, ...]
    kill: Callable[[], Coroutine[object, object, None]]
    spares: bool = False
    counts: Counter[str] = field(default_factory=Counter)


async def one_round(victim: Victim, expected: list[str | None], dice: random.Random, salt: str) -> None:
    """Raises ``AssertionError`` for what does not hold."""
    streams = [asyncio.create_task(stream(victim.place, prompt, salt)) for prompt in PROMPTS]
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
            until, lambda place=place: is_whole(place), 10, f"no block is held on {place.name}", 0.1
        )


def is_well(place: Place) -> bool:
    """Whether /health misses nothing."""
    return place.server.get("/health").text == '{"status":"ok"}'


def is_whole(place: Place) -> bool:
    """Whether no block is held and no transfer is under way."""
    transfers = () if place.name == "ranks" else ("fwk:num_kv_fetching", "fwk:num_kv_offered")
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


async def run(victims: list[Victim], rounds: int, seed: int) -> int:
    """How many rounds did not hold."""
    dice, num_bad = random.Random(seed), 0
    for victim in victims:
        expected = [await stream(victim.place, prompt) for prompt in PROMPTS]
        assert None not in expected
        print(f"{victim.name}: {sum(len(text or '') for text in expected)} characters without a death", flush=True)
        for number in range(rounds):
            started, told = time.monotonic(), "held"
            try:
                await one_round(victim, expected, dice, f"{victim.name} {number}")
            except (AssertionError, OSError, psutil.Error) as error:
                num_bad, told = num_bad + 1, f"WRONG: {type(error).__name__} {error!s:.300}"
            took = time.monotonic() - started
            print(f"{victim.name} {number}: {told} after {took:.1f} s; {dict(victim.counts)}", flush=True)
    return num_bad


def main() -> int:
    """The exit code is 1 when anything did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak.kills", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], help="rank, registry, prefill, decode")
    args = parser.parse_args()
    folder, dice = Path(tempfile.mkdtemp(prefix="fwk-kills-")), random.Random(args.seed)
    secret = folder / "secret"
    secret.write_bytes(random.randbytes(32).hex().encode())
    model, places = write_model(folder / "model"), list[Place]()
    etcd = None if is_missing() else EtcdServer()
    if etcd is None:
        print(f"the registry is a file, and not killed: it {MISSING}")
    try:
        named = ("--disaggregation-registry", etcd.url if etcd else f"file://{folder}")
        shared = (*named, "--disaggregation-registry-lease", "2", "--disaggregation-token-file", str(secret))
        port = free_port()
        own = ("--disaggregation-mode", "prefill", "--disaggregation-advertise-url", f"http://127.0.0.1:{port}")
        places.append(Place("prefill", model, folder, *shared, *own, port=port))
        own = ("--disaggregation-mode", "decode", "--disaggregation-min-prompt-tokens", "64")
        places.append(Place("decode", model, folder, *shared, *own))
        prefill, decode = places
        victims = [
            Victim("prefill", decode, (prefill,), lambda: server(prefill), spares=True),
            Victim("decode", decode, (prefill,), lambda: server(decode)),
        ]
        if etcd is not None:
            victims.insert(0, Victim("registry", decode, (prefill,), lambda: registry(etcd), spares=True))
        if not args.only or "rank" in args.only:
            places.append(Place("ranks", model, folder, "--tp-size", "2"))
            victims.insert(0, Victim("rank", places[-1], (), lambda: rank(places[-1], dice)))
        victims = [victim for victim in victims if not args.only or victim.name in args.only]
        num_bad = asyncio.run(run(victims, args.rounds, args.seed))
        print("\n".join(f"{victim.name}: {dict(victim.counts)}" for victim in victims))
    finally:
        for place in places:
            place.server.close()
        if etcd is not None:
            etcd.stop()
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
