"""Run the soak and write its report; the exit code is 1 when anything did not hold."""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import re
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import httpx
import psutil

from fwk_loaders.dummy.tokenizer import CHAT_TEMPLATE
from fwk_process.malloc import REST_SECONDS
from tests.faults.soak.faults import ADMIN_KEY, WARM, Scene, fault_of
from tests.faults.soak.load import Load
from tests.faults.soak.memory import Memory
from tests.faults.soak.report import Minute, report, row
from tests.helpers.adapters import make_adapter
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.rig import Server, install_plugins

MINUTE = 60.0
SAMPLE_SECONDS = 1.0
MOST_GROWTH = 1.0  # MB a minute
MOST_TOLD = 10  # of the troubles of a minute
FLAGS = (
    "--load-format", "safetensors", "--executor", "faulty", "--schedule-policy", "faulty",
    "--sampling-backend", "faulty", "--max-running-requests", "16", "--max-queued-requests", "64", "--health-monitor",
    "--watchdog-timeout", "15", "--ping-timeout", "3", "--write-timeout", "5", "--request-timeout", "60",
    "--enable-lora", "--admin-api-key", ADMIN_KEY,
)  # fmt: skip


class Soak:
    """One run."""

    def __init__(self, server: Server, rate: float, seed: int, adapters: tuple[str, ...]) -> None:
        self.server = server
        self.load = Load(server, rate, seed)
        self.scene = Scene(server, self.load, random.Random(seed), adapters)
        self.memory = {"API process": Memory(), "engine": Memory()}
        self.minutes: list[Minute] = []

    async def run(self, num_minutes: int) -> None:
        """The load, the samples, and a fault each minute."""
        others = [asyncio.create_task(self.load.run()), asyncio.create_task(self._sample())]
        for number in range(num_minutes):
            self.minutes.append(await self._minute(number))
            print(" | ".join(row(number, self.minutes[-1])), flush=True)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _sample(self) -> None:
        api = psutil.Process(self.server.process.pid)
        while True:
            minute = len(self.minutes)
            if minute >= WARM and self.server.engine is not None:
                self.memory["API process"].note(api, minute)
                self.memory["engine"].note(self.server.engine, minute)
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _minute(self, number: int) -> Minute:
        fault = fault_of(number)
        minute = Minute(fault.__name__.replace("_", " "))
        started, log_seen = time.monotonic(), len(self.server.log)
        num_known = len(self.load.troubles)
        await asyncio.sleep(MINUTE / 6)
        try:
            minute.seen = await fault(self.scene)
        except (AssertionError, OSError, aiohttp.ClientError) as error:
            minute.troubles.append(f"the fault: {type(error).__name__} {error!s:.500}")
        await asyncio.sleep(max(0.0, started + 0.8 * MINUTE - time.monotonic()))
        try:
            async with self.load.quiet():
                if number < WARM:  # each kind of fault reserves something, once
                    await asyncio.to_thread(self.server.note_memory)
                await asyncio.to_thread(self.server.check_invariants, may_log_errors=True)
                await asyncio.sleep(REST_SECONDS + 2)  # what was freed goes back
                minute.api = psutil.Process(self.server.process.pid).memory_info().rss / 2**20
                minute.engine = self.server.engine.memory_info().rss / 2**20 if self.server.engine else 0.0
        except (AssertionError, OSError, httpx.HTTPError) as error:
            minute.troubles.append(f"what must hold afterwards: {type(error).__name__} {error!s:.500}")
        minute.troubles += self.load.troubles[num_known:][:MOST_TOLD]
        minute.log = [entry for entry in self.server.log[log_seen:].splitlines() if not re.search(" INFO ", entry)]
        await asyncio.sleep(max(0.0, started + MINUTE - time.monotonic()))
        return minute

    def verdict(self) -> list[str]:
        """What did not hold."""
        found = [f"minute {i + 1}, {m.fault}: {trouble}" for i, m in enumerate(self.minutes) for trouble in m.troubles]
        for name, memory in self.memory.items():
            if memory.slope >= MOST_GROWTH:
                found.append(f"the {name} grows by {memory.slope:.2f} MB a minute")
        return found


def main() -> int:
    """Start the server, run, report."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--minutes", type=int, default=30)
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second, apart from what faults add")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, help="where to write it (default: standard output)")
    args = parser.parse_args()
    if args.minutes < WARM + 4:
        parser.error(f"{WARM} minutes are the warm-up, and memory is measured over four at the least")
    logging.basicConfig(level=logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="fwk-soak-") as name:
        folder = Path(name)
        base, guests, site = folder / "base", folder / "guests", folder / "site"
        site.mkdir()
        make_checkpoint(base, "llama", max_position_embeddings=2048)
        (base / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        adapters = [make_adapter(base, guests / f"guest{seed}", seed=seed) for seed in (1, 2)]
        lora = ("--lora-paths", f"first={adapters[0]}", f"second={adapters[1]}", "--lora-dirs", str(guests))
        server = Server(base, *FLAGS, *lora, python_path=install_plugins(site))
        try:
            server.start()
            soak = Soak(server, args.rate, args.seed, tuple(map(str, adapters)))
            asyncio.run(soak.run(args.minutes))
            failures = soak.verdict()
            code = server.stop()
            if code != 0:
                failures.append(f"the server ended with {code}")
        finally:
            server.close()
    command = " ".join(["python -m tests.faults.soak", *sys.argv[1:]])
    text = report(command, FLAGS, soak.minutes, soak.load.outcomes, soak.memory, failures)
    if args.report is None:
        print(text)
    else:
        args.report.write_text(text)
    print("\n".join(failures) or "all of it held")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
