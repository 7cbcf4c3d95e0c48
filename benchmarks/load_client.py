"""A closed-loop load on an OpenAI server: streamed, greedy, ``ignore_eos``; one connection a request."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field

import aiohttp

from benchmarks.workload import Scenario


@dataclass
class Timing:
    """When a request was sent, and when each of its tokens came (seconds)."""

    sent: float
    times: list[float] = field(default_factory=list[float])
    num_tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def tpot(self) -> float:
        return (self.times[-1] - self.times[0]) / max(self.num_tokens - 1, 1)


async def one(session: aiohttp.ClientSession, url: str, prompt: list[int], output_len: int) -> Timing:
    """Stream one completion; raises when the server does not answer as it should."""
    body = {
        "prompt": prompt,
        "max_tokens": output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    timing = Timing(time.perf_counter())
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            if event.get("usage"):
                timing.num_tokens = event["usage"]["completion_tokens"]
            if event["choices"]:
                timing.times.append(time.perf_counter())
    if timing.num_tokens != output_len:
        raise RuntimeError(f"{timing.num_tokens} tokens instead of {output_len}")
    return timing


async def load(url: str, scenario: Scenario, prompts: list[list[int]]) -> dict[str, float]:
    """Run a scenario; output tokens a second, and medians in milliseconds."""
    gate = asyncio.Semaphore(scenario.concurrency)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as session:

        async def gated(prompt: list[int]) -> Timing:
            async with gate:
                return await one(session, url, prompt, scenario.output_len)

        started = time.perf_counter()
        timings = await asyncio.gather(*(gated(prompt) for prompt in prompts))
        wall = time.perf_counter() - started
    return {
        "tokens_per_s": len(prompts) * scenario.output_len / wall,
        "ttft_ms": 1e3 * statistics.median(t.ttft for t in timings),
        "tpot_ms": 1e3 * statistics.median(t.tpot for t in timings),
    }
