"""What is done to the server, one thing a minute. Each returns what it saw, in a few words, or raises."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from tests.faults.soak.load import Load
from tests.helpers.client import Client, Streamed, connect, dial, raw_request, together
from tests.helpers.rig import Server, is_alive, is_helper, until
from tests.helpers.rude import Rude

RESTART_SECONDS = 90.0
ADMIN_KEY = "of-the-soak"
PATIENT_CLIENT = """
import sys, urllib.request
body = b'{"prompt": "stopped", "max_tokens": 1500, "n": 4, "stream": true, "return_token_ids": true}'
asked = urllib.request.Request(sys.argv[1] + "/v1/completions", body, {"content-type": "application/json"})
for line in urllib.request.urlopen(asked):
    print(len(line), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Scene:
    """What a fault is done to."""

    server: Server
    load: Load
    dice: random.Random
    adapters: tuple[str, ...]  # folders clients may load from


Fault = Callable[[Scene], Awaitable[str]]


async def _statuses(scene: Scene, bodies: list[Any], path: str = "/v1/completions") -> Counter[int]:
    async with connect(scene.server) as client:
        return Counter(status for status, _ in await together(client.post(body, path) for body in bodies))


async def _replaced(scene: Scene, harm: Callable[[], Awaitable[Any]]) -> str:
    """Do what the engine dies of, under streams; wait until another one serves."""
    server, old = scene.server, scene.server.engine
    count = server.log.count("serves again")
    async with scene.load.bad_time(), connect(server) as client:
        streams = [Streamed() for _ in range(6)]
        running = asyncio.ensure_future(
            together(client.stream(s, prompt=f"{i}", max_tokens=1900, ignore_eos=True) for i, s in enumerate(streams))
        )
        await asyncio.wait_for(asyncio.gather(*(s.has_begun.wait() for s in streams)), 20)
        await harm()
        await running
        assert all(s.is_done and len(s.errors) == 1 for s in streams), "every stream ends with one error"
        await asyncio.to_thread(until, lambda: not is_alive(old), RESTART_SECONDS, "the end of the engine")
        is_back = lambda: server.log.count("serves again") > count and server.health() == 200  # noqa: E731
        await asyncio.to_thread(until, is_back, RESTART_SECONDS, "another engine")
    server.take_new_engine()
    return "6 streams ended with an error; another engine serves"


async def engine_killed(scene: Scene) -> str:
    async def harm() -> None:
        scene.server.signal_engine(signal.SIGKILL)

    return await _replaced(scene, harm)


async def engine_hung(scene: Scene) -> str:
    async def harm() -> None:
        scene.server.signal_engine(signal.SIGSTOP)

    return await _replaced(scene, harm)


async def policy_raises(scene: Scene) -> str:
    return await _replaced(scene, lambda: _statuses(scene, [{"prompt": "bad", "fault": "policy:2"}]))


async def step_raises(scene: Scene) -> str:
    return await _replaced(scene, lambda: _statuses(scene, [{"prompt": "bad", "fault": "model:3"}]))


async def engine_exits(scene: Scene) -> str:
    return await _replaced(scene, lambda: _statuses(scene, [{"prompt": "bad", "fault": "exit:3"}]))


async def engine_stopped_for_a_while(scene: Scene) -> str:
    async with scene.load.bad_time():
        scene.server.signal_engine(signal.SIGSTOP)
        await asyncio.sleep(4)
        scene.server.signal_engine(signal.SIGCONT)
        await asyncio.to_thread(until, lambda: scene.server.health() == 200, 20, "health 200")
    return "it continues"


async def step_sleeps(scene: Scene) -> str:
    return str(dict(await _statuses(scene, [{"prompt": "slow", "fault": "sleep:2"}])))


async def processors_raise(scene: Scene) -> str:
    places = ("add:1", "apply:1", "apply:2", "apply:7")
    seen = await _statuses(
        scene, [{"prompt": f"bad {i}", "fault": places[i % 4], "ignore_eos": True} for i in range(20)]
    )
    assert seen == {500: 20}, seen
    return "20 times 500"


async def storm_of_disconnects(scene: Scene) -> str:
    seen: Counter[str] = Counter()
    gate = asyncio.Semaphore(40)

    async def one(seed: int) -> None:
        async with gate:
            await Rude(scene.server, random.Random(seed)).run(seen)

    async with scene.load.bad_time():  # the queue is full of them: others wait long
        await together((one(scene.dice.randrange(2**32)) for _ in range(200)), 120)
    return f"{seen.total()} clients hung up"


async def client_stopped(scene: Scene) -> str:
    """A process that is stopped in the middle of its stream, longer than it may leave its reply unread."""
    command = [sys.executable, "-c", PATIENT_CLIENT, scene.server.url]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert client.stdout is not None
        await asyncio.to_thread(client.stdout.readline)
        client.send_signal(signal.SIGSTOP)
        await asyncio.sleep(12)
        client.send_signal(signal.SIGCONT)
        rest = await asyncio.wait_for(asyncio.to_thread(client.stdout.read), 60)
    finally:
        client.kill()
        client.wait(10)
    return f"it read {len(rest.splitlines())} lines more"


async def readers_asleep(scene: Scene) -> str:
    """Connections that ask for much and never read."""
    body = {"prompt": "silent", "max_tokens": 1500, "n": 2, "stream": True, "return_token_ids": True, "logprobs": 5}
    writers = []
    for _ in range(8):
        _, writer = await dial(scene.server)
        writer.transport.pause_reading()  # pyright: ignore[reportAttributeAccessIssue]
        writer.write(b"".join(raw_request(body)))
        writers.append(writer)
    await asyncio.sleep(12)
    for writer in writers:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return "8 clients never read"


async def oversized(scene: Scene) -> str:
    bodies: list[Any] = [
        {"prompt": "x" * 7_000_000}, b'{"prompt": "' + b"y" * 9_000_000 + b'"}', {"prompt": "z", "n": 2**40},
        {"prompt": [5] * 100_000}, b"[" * 100_000, {"prompt": "s", "stop": ["q" * 10_000] * 50},
        {"prompt": ["many"] * 5000}, {"prompt": "b", "logit_bias": {str(i): 1 for i in range(100_000)}},
    ]  # fmt: skip
    seen = await _statuses(scene, bodies)
    assert set(seen) <= {400, 413}, seen
    return f"refused: {dict(seen)}"


async def malformed(scene: Scene) -> str:
    pieces = (
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
    )
    for i in range(100):
        _, writer = await dial(scene.server)
        writer.write(pieces[i % 3] + scene.dice.randbytes(200))
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    seen = await _statuses(scene, [b"{", b'{"prompt": NaN}', b"\xff\xfe", b'{"prompt": "\\ud800"}'] * 10)
    assert seen == {400: 40}, seen
    return "100 broken requests, 40 times 400"


async def more_than_fits(scene: Scene) -> str:
    seen = await _statuses(scene, [{"prompt": f"flood {i}", "max_tokens": 8} for i in range(400)])
    assert set(seen) <= {200, 429}, seen
    assert seen.total() == 400
    return f"{seen[200]} served, {seen[429]} times 429"


async def grammar_bombs(scene: Scene) -> str:
    deep: dict[str, Any] = {}
    for _ in range(60):
        deep = {"type": "array", "items": deep}
    asked = [
        {"json": {"type": "string", "minLength": 10**9}}, {"json": deep}, {"json": {"$ref": "#"}},
        {"regex": "(a*)*b("}, {"regex": "((a{1,300}){1,300}){1,300}"},
        {"json": {"enum": list(range(20_000))}}, {"grammar": "start: start"},
    ]  # fmt: skip
    seen = await _statuses(scene, [{"prompt": "g", "max_tokens": 4, "structured_outputs": one} for one in asked])
    assert set(seen) <= {200, 400}, seen
    return f"answered: {dict(seen)}"


async def adapters_come_and_go(scene: Scene) -> str:
    seen: Counter[str] = Counter()

    async def one(client: Client, admin: Client, number: int) -> None:
        name = f"guest{number}"
        path = scene.adapters[number % len(scene.adapters)]
        status, reply = await admin.post({"lora_name": name, "lora_path": path}, "/v1/load_lora_adapter")
        assert status == 200, reply
        status, reply = await client.post({"prompt": "guest", "model": name, "max_tokens": 8})
        seen[str(status)] += 1
        status, reply = await admin.post({"lora_name": name}, "/v1/unload_lora_adapter")
        assert status == 200, reply

    async with connect(scene.server) as client, connect(scene.server, key=ADMIN_KEY) as admin:
        await together(one(client, admin, number) for number in range(10))
        status, reply = await admin.post({"lora_name": "out", "lora_path": "../../etc"}, "/v1/load_lora_adapter")
        assert status == 400, reply
    assert set(seen) <= {"200", "429"}, seen
    return f"10 loaded, asked, unloaded: {json.dumps(seen)}"


async def helper_killed(scene: Scene) -> str:
    """The process that compiles grammars: the next grammar starts another."""
    schemas = [{"type": "object", "properties": {f"k{scene.dice.random()}": {"type": "null"}}} for _ in range(6)]
    bodies = [{"prompt": "x", "max_tokens": 2, "structured_outputs": {"json": schema}} for schema in schemas]
    async with scene.load.bad_time():
        await _statuses(scene, bodies[:2])
        helpers = [one for one in scene.server.children() if is_helper(one)]
        assert helpers, "grammars were compiled, and nothing compiles them"
        for helper in helpers:
            helper.kill()
        await asyncio.to_thread(until, lambda: not any(map(is_alive, helpers)), 5, "the end of the helper")
    seen = await _statuses(scene, bodies[2:])
    assert seen == {200: 4}, seen
    return "another helper compiles"


DEADLY: list[Fault] = [engine_killed, engine_hung, policy_raises, step_raises, engine_exits]
OTHERS: list[Fault] = [
    engine_stopped_for_a_while,
    oversized,
    storm_of_disconnects,
    client_stopped,
    processors_raise,
    more_than_fits,
    grammar_bombs,
    adapters_come_and_go,
    readers_asleep,
    malformed,
    step_sleeps,
    helper_killed,
]
WARM = len(DEADLY) + len(OTHERS)
"""Minutes until every fault was seen: memory is measured from then on."""


def fault_of(minute: int) -> Fault:
    """First what engines die of, so that one then lives for twice as long as the other faults take; and over again."""
    cycle = DEADLY + OTHERS + OTHERS
    return cycle[minute % len(cycle)]
