"""How long ``/health`` takes by the clock while large bodies are read, with busy processes alongside.

    python -m benchmarks.health_gaps --busy 2

Each body is sent twelve at a time to a server of the default model; a probe asks every 50 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import aiohttp

from fwk_kit.bench.servers import of_fwk

AT_ONCE = 12
PAUSE = 0.05
USER = {"role": "user", "content": "Hi"}
Body = tuple[str, Callable[[], Any]]
BODIES: dict[str, Body] = {
    "700,000 keys of logit_bias": (
        "/v1/completions",
        lambda: {"prompt": "x", "logit_bias": {str(i): 1 for i in range(700_000)}},
    ),
    "600,000 unknown keys": ("/v1/completions", lambda: {"prompt": "x"} | {f"k{i}": 0 for i in range(600_000)}),
    "8 MB of one message": ("/v1/chat/completions", lambda: {"messages": [USER | {"content": "word " * 1_600_000}]}),
    "10,000 messages": ("/v1/chat/completions", lambda: {"messages": [USER] * 10_000}),
    "400,000 numbers nested": ("/v1/completions", lambda: {"prompt": [[i % 100 for i in range(400_000)]]}),
    "500,000 stop words": ("/v1/completions", lambda: {"prompt": "x", "stop": ["a"] * 500_000}),
    "1,000 tools": (
        "/v1/chat/completions",
        lambda: {
            "messages": [USER],
            "tools": [{"type": "function", "function": {"name": f"t{i}"}} for i in range(1_000)],
        },
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--busy", type=int, default=2, help="processes that compute all the time")
    arguments = parser.parse_args()
    busy = [multiprocessing.get_context("spawn").Process(target=_compute, daemon=True) for _ in range(arguments.busy)]
    with of_fwk("fwk", ["--device", "cpu"]).running() as server:
        for process in busy:
            process.start()
        print(f"{os.cpu_count()} cores, {arguments.busy} busy processes, {AT_ONCE} bodies at once")
        print("| body | statuses | s in all | /health median ms | most ms |\n| --- | --- | --- | --- | --- |")
        for name, (path, make) in BODIES.items():
            print(
                asyncio.run(_measure(server.url, name, path, json.dumps(make(), separators=(",", ":")).encode())),
                flush=True,
            )
        for process in busy:
            process.kill()


def _compute() -> None:
    while True:
        pass


async def _measure(url: str, name: str, path: str, body: bytes) -> str:
    waits: list[float] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as session:

        async def probe() -> None:
            while True:
                began = time.perf_counter()
                async with session.get(f"{url}/health") as reply:
                    assert reply.status == 200
                    await reply.read()
                waits.append(time.perf_counter() - began)
                await asyncio.sleep(PAUSE)

        async def send() -> int:
            async with session.post(url + path, data=body, headers={"content-type": "application/json"}) as reply:
                await reply.read()
                return reply.status

        probing = asyncio.create_task(probe())
        began = time.perf_counter()
        statuses = await asyncio.gather(*(send() for _ in range(AT_ONCE)))
        seconds = time.perf_counter() - began
        await asyncio.sleep(2 * PAUSE)
        if probing.done():
            probing.result()
        probing.cancel()
    told = " ".join(str(status) for status in sorted(set(statuses)))
    return f"| {name} | {told} | {seconds:.1f} | {1e3 * statistics.median(waits):.0f} | {1e3 * max(waits):.0f} |"


if __name__ == "__main__":
    main()
