"""What a step's scheduling costs with a short and with a long queue, for each policy.

    python -m benchmarks.scheduling [--waiting 100,10000] [--steps 300] [--policies fcfs,sjf,...]

Runs the real scheduler on the tests' fake worker, whose work is not counted. In each step a few sequences end, so a
few of the queue start, and as many arrive. The queues are measured in turns within one run; compare the ratios.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from fwk.engine.core import Engine
from fwk.types import Request, SamplingParams, Service
from fwk_kit.testing.base import installed
from fwk_kit.testing.fake_engine import make_engine

NUM_RUNNING = 32
NUM_TENANTS = 500
TURN = 25


class Run:
    """An engine with a queue that stays as long as it is."""

    def __init__(self, policy: str, num_waiting: int) -> None:
        self._random = random.Random(0)
        self._num_sent = 0
        self._num_waiting = num_waiting
        self.scheduling: list[float] = []
        self.arriving: list[float] = []
        self._engine: Engine = make_engine(
            policy=policy,
            num_blocks=4096,
            block_size=16,
            max_running=NUM_RUNNING,
            step_tokens=2048,
            chunk_tokens=2048,
            check_blocks=False,
            now=time.monotonic,
        )
        self._fill()
        for _ in range(10):
            self._step()
        self.scheduling.clear()
        self.arriving.clear()

    def steps(self, count: int) -> None:
        """Run that many steps and note what they cost."""
        for _ in range(count):
            self._step()

    def _step(self) -> None:
        started = time.perf_counter()
        step = self._engine.scheduler.schedule()
        self.scheduling.append(time.perf_counter() - started)
        assert step is not None
        result = self._engine.executor.collect(self._engine.executor.launch(step.batch))
        self._engine.scheduler.update(step, result)
        self._fill()

    def _fill(self) -> None:
        while self._engine.scheduler.num_waiting < self._num_waiting:
            request = self._request()
            started = time.perf_counter()
            self._engine.add(request)
            self.arriving.append(time.perf_counter() - started)

    def _request(self) -> Request:
        rng = self._random
        self._num_sent += 1
        family = [rng.randrange(50)] * 32
        return Request(
            request_id=str(self._num_sent),
            prompt_token_ids=family + [rng.randrange(90) for _ in range(32)],
            sampling=SamplingParams(max_tokens=rng.randint(4, 16), temperature=0.0),
            priority=rng.randrange(5),
            service=Service(tenant=str(rng.randrange(NUM_TENANTS)), session=str(rng.randrange(5_000))),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", default="100,10000", help="lengths of the queue")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--policies", default=",".join(item.name for item in installed().family("schedulers")))
    given = parser.parse_args()
    lengths = [int(text) for text in given.waiting.split(",")]
    print("| policy | " + " | ".join(f"step, {n} waiting (µs)" for n in lengths) + " | ratio | arrival (µs) |")
    print("|---" * (len(lengths) + 3) + "|")
    for policy in given.policies.split(","):
        runs = [Run(policy, length) for length in lengths]
        for _ in range(given.steps // TURN):
            for run in runs:
                run.steps(TURN)
        medians = [statistics.median(run.scheduling) * 1e6 for run in runs]
        cells = " | ".join(f"{median:.0f}" for median in medians)
        arrival = statistics.median(runs[-1].arriving) * 1e6
        print(f"| {policy} | {cells} | {medians[-1] / medians[0]:.2f} | {arrival:.1f} |", flush=True)


if __name__ == "__main__":
    main()
