"""Check 40: somebody sets the machine's clock. Durations do not notice; ``created`` follows."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.client import Streamed, connect
from tests.helpers.rig import FAKE, Server
from tests.helpers.servers import Start

HOUR = 3600
SHIFTS = (HOUR, -HOUR, 365 * 24 * HOUR, 0)
TIMEOUTS = ("--request-timeout", "60", "--queue-timeout", "60", "--ping-timeout", "5", "--watchdog-timeout", "30",
            "--read-timeout", "60", "--write-timeout", "60")  # fmt: skip


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that says by how many seconds the server's wall clock is off."""
    file = tmp_path_factory.mktemp("clock") / "offset"
    file.write_text("0")
    return file


@pytest.fixture(scope="module")
def server(spawn: Start, clock: Path) -> Server:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = clock.parent / "clock.so"
    source = Path(__file__).parent / "clock.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True, timeout=60)
    environment = {"LD_PRELOAD": str(library), "FWK_TEST_CLOCK": str(clock)}
    return spawn(*FAKE, "--fake-step-ms", "10", *TIMEOUTS, environment=environment)


def durations(server: Server) -> dict[str, float]:
    names = ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
    return {name: server.metric(f"fwk:{name}_seconds_sum") for name in names}


@pytest.mark.sweep
async def test_the_clock_is_set_while_it_serves(server: Server, clock: Path) -> None:
    started = time.monotonic()
    before = durations(server)
    async with connect(server) as client:
        for shift in SHIFTS:
            streams = [Streamed() for _ in range(4)]
            running = [
                asyncio.create_task(client.stream(s, prompt=f"{i} {shift}", max_tokens=80, ignore_eos=True))
                for i, s in enumerate(streams)
            ]
            await asyncio.wait_for(asyncio.gather(*(s.has_begun.wait() for s in streams)), 20)
            clock.write_text(str(shift))
            assert server.health() == 200
            await asyncio.gather(*running)
            assert all(s.is_done and not s.errors and len(s.token_ids[0]) == 80 for s in streams), shift
            _, reply = await client.post({"prompt": "Hi", "max_tokens": 1})
            assert abs(reply["created"] - (time.time() + shift)) < 10
            now = durations(server)
            assert all(0 <= now[name] - before[name] < 5 * 20 for name in now), (shift, before, now)
            before = now
            server.check_invariants()
    for hours in range(1, 5):  # while nothing comes but a ping now and then: no silence has lasted an hour
        clock.write_text(str(hours * HOUR))
        for _ in range(5):
            assert server.health() == 200
            await asyncio.sleep(0.05)
    server.check_invariants()
    assert "not answered" not in server.log
    assert time.monotonic() - started < 60
