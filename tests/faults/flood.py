"""Thousands of requests at once: each is served or refused, none hangs, and memory stays bounded.

``python -m tests.faults.flood --requests 10000`` asks a server with the engine without a model; ``--engine tiny`` one
with a tiny random model. Each request has a connection of its own, so client and server need a descriptor for each
(``ulimit -n``): the soft limit is raised here, and the server inherits it. The exit code is 1 when anything did
not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop

from tests.helpers.client import HealthProbe, raw_request
from tests.helpers.rig import FAKE, Server, assert_no_leak, install_plugins, write_model

SPARE_DESCRIPTORS = 200
HANG_SECONDS = 120.0
MB = 2**20
ENGINES = {"fake": FAKE, "tiny": ("--max-running-requests", "32")}


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of one request."""

    outcome: str  # the status, or how the connection failed
    seconds: float
    is_whole: bool  # all its tokens, or a refusal that says when to try again


class Peak:
    """The most resident memory of two processes together, sampled from a thread."""

    def __init__(self, *processes: psutil.Process) -> None:
        self._processes = processes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.most = [0.0] * len(processes)

    def now(self) -> list[float]:
        return [process.memory_info().rss / MB for process in self._processes]

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            self.most = [max(pair) for pair in zip(self.most, self.now(), strict=True)]

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def allow_descriptors(count: int) -> None:
    """Raise the limit of open files to ``count``, for this process and those it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        raise SystemExit(f"{count} descriptors are needed and the hard limit is {hard}: ask for fewer --requests")
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


class Asking(asyncio.Protocol):
    """One request over a connection of its own, as cheaply as can be: what is measured is the server."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._pieces: list[bytes] = []
        self.reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._pieces.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.reply.done():
            self.reply.set_result(b"".join(self._pieces))


async def ask(address: tuple[str, int], number: int, num_tokens: int) -> Reply:
    """One request; every other one streams."""
    is_stream = number % 2 == 0
    head, body = raw_request(
        {"prompt": f"request {number}", "max_tokens": num_tokens, "ignore_eos": True, "stream": is_stream}
    )
    started = time.monotonic()
    try:
        async with asyncio.timeout(HANG_SECONDS):
            request = head.removesuffix(b"\r\n") + b"connection: close\r\n\r\n" + body
            _, asking = await asyncio.get_running_loop().create_connection(lambda: Asking(request), *address)
            raw = await asking.reply
    except TimeoutError:
        return Reply("hung", time.monotonic() - started, False)
    except OSError as error:
        return Reply(type(error).__name__, time.monotonic() - started, False)
    seconds = time.monotonic() - started
    head, _, content = raw.partition(b"\r\n\r\n")
    assert_no_leak(content.decode())
    status = head[9:12].decode() or "cut off"
    if status != "200":
        is_whole = b"\r\nretry-after:" in head and "error" in json.loads(content or b"{}")
    elif is_stream:
        is_whole = b"data: [DONE]\n\n" in content and b'"finish_reason":"length"' in content
    else:
        is_whole = json.loads(content)["usage"]["completion_tokens"] == num_tokens
    return Reply(status, seconds, is_whole)


async def ask_all(url: str, count: int, num_tokens: int) -> list[Reply]:
    """All requests at once."""
    host, port = url.removeprefix("http://").split(":")
    return await asyncio.gather(*(ask((host, int(port)), number, num_tokens) for number in range(count)))


def flood(url: str, count: int, num_tokens: int) -> list[Reply]:
    """As ``ask_all``, in a process of its own: whoever asks for /health meanwhile is not held up by it."""
    return uvloop.run(ask_all(url, count, num_tokens))


def summary(replies: list[Reply], seconds: float) -> list[str]:
    """A line for each outcome."""
    by_outcome: dict[str, list[float]] = defaultdict(list)
    for reply in replies:
        by_outcome[reply.outcome].append(reply.seconds)
    lines = [f"{len(replies)} requests in {seconds:.1f} s"]
    for outcome, times in sorted(by_outcome.items()):
        times.sort()
        median, last = statistics.median(times), times[-1]
        lines.append(
            f"  {outcome}: {len(times)}; after {times[0]:.2f} s at first, {median:.2f} at half, {last:.2f} at last"
        )
    return lines


def main() -> int:
    """Start the server, flood it, look at what is left."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.flood", description="Other options are the server's, as --max-queued-requests 256."
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="fake")
    parser.add_argument("--tokens", type=int, default=4, help="that each request asks for")
    parser.add_argument("--rounds", type=int, default=2, help="the second finds the memory of the first")
    args, flags = parser.parse_known_args()
    allow_descriptors(args.requests + SPARE_DESCRIPTORS)
    with tempfile.TemporaryDirectory(prefix="fwk-flood-") as name:
        folder = Path(name)
        path = install_plugins(folder)
        server = Server(write_model(folder / "tiny"), *ENGINES[args.engine], *flags, python_path=path)
        try:
            return measure(server.start(), args)
        finally:
            if server.is_running:
                server.stop()
            server.close()


def measure(server: Server, args: argparse.Namespace) -> int:
    """The rounds, and what must hold after each. Returns the exit code."""
    code = 0
    assert server.engine is not None
    processes = psutil.Process(server.process.pid), server.engine
    spawn = multiprocessing.get_context("spawn")
    with Peak(*processes) as peak, ProcessPoolExecutor(1, spawn) as pool:
        print(f"resident before: API {peak.now()[0]:.0f} MB, engine {peak.now()[1]:.0f} MB")
        for _ in range(args.rounds):
            with HealthProbe(server) as probe:
                started, worked = time.monotonic(), processes[0].cpu_times().user
                replies = pool.submit(flood, server.url, args.requests, args.tokens).result()
                seconds = time.monotonic() - started
            print("\n".join(summary(replies, seconds)))
            print(f"  the API process worked for {processes[0].cpu_times().user - worked:.1f} s")
            print(f"  /health: {sorted(probe.statuses)}, at most {probe.slowest:.2f} s")
            counts = Counter(reply.outcome for reply in replies)
            partial = sum(not reply.is_whole for reply in replies)
            if not set(counts) <= {"200", "429", "503"} or partial:
                print(f"  WRONG: {dict(counts)}, {partial} not whole")
                code = 1
            server.check_invariants()
            now = peak.now()
            for role, size, most in zip(("API", "engine"), now, peak.most, strict=True):
                print(f"  resident: {role} {size:.0f} MB, {most:.0f} at most")
    return code


if __name__ == "__main__":
    sys.exit(main())
