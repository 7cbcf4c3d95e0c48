"""What planning a step costs when it is hidden behind the step before, and when it is not.

    python -m benchmarks.overlap [--forward-ms 10] [--plan-ms 5] [--steps 60]

The device is a fake one: its forward pass sleeps, as the engine's process does while a real device computes. Planning
is made to cost as much as asked, busily, as a policy over a long queue would. The plain loop should take
forward + plan a step, the overlapped one the longer of the two.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from fwk import SamplingParams
from fwk.engine.core import Engine
from fwk.interfaces.executor import ExecutorContext, Worker, WorkerInfo, WorkerRecipe
from fwk.plugins import discover, load_object
from fwk.plugins.selection import find
from fwk.types import Batch, Request, StepResult
from fwk_kit.testing.fake_engine import FakeExecutor, FakeWorker, make_engine, reference

NO_RECIPE = WorkerRecipe("nothing:nobody", {})
PROMPT = [1, 2, 3]


class SlowWorker(Worker):
    """The tests' fake worker behind a forward pass that takes its time."""

    def __init__(self, inner: FakeWorker, seconds: float) -> None:
        self._inner = inner
        self._seconds = seconds

    def load(self) -> WorkerInfo:
        return self._inner.load()

    def execute(self, batch: Batch) -> StepResult:
        time.sleep(self._seconds)
        return self._inner.execute(batch)

    def call(self, name: str, *args: Any) -> Any:
        return self._inner.call(name, *args)


def think(seconds: float) -> None:
    """Use the processor for that long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def run(executor_name: str, forward: float, plan: float, steps: int) -> tuple[float, list[int]]:
    """Seconds a step, and the tokens."""
    plain = make_engine(max_len=steps + 16, num_blocks=steps)
    assert isinstance(plain.executor, FakeExecutor)
    worker = SlowWorker(plain.executor.worker, forward)
    schedule = plain.scheduler.schedule

    def slow_schedule() -> Any:
        think(plan)
        return schedule()

    plain.scheduler.schedule = slow_schedule  # type: ignore[method-assign]
    executor = load_object(find(discover(), "executors", executor_name))(
        ExecutorContext(lambda group: worker, NO_RECIPE)
    )
    info = executor.load()
    engine = Engine(plain.scheduler, executor, plain.info)
    assert info.num_blocks == steps
    sampling = SamplingParams(max_tokens=steps, temperature=0, ignore_eos=True)
    engine.add(Request(request_id="r", prompt_token_ids=PROMPT, sampling=sampling))
    tokens: list[int] = []
    started = time.perf_counter()
    while engine.has_work:
        for event in engine.step():
            tokens += event.token_ids
    seconds = time.perf_counter() - started
    engine.close()
    return seconds / steps, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forward-ms", type=float, default=10.0)
    parser.add_argument("--plan-ms", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    forward, plan, steps = arguments.forward_ms / 1e3, arguments.plan_ms / 1e3, arguments.steps
    expected = reference(PROMPT, steps)
    per_step: dict[str, float] = {}
    for name in ("inprocess", "threaded"):
        per_step[name], tokens = run(name, forward, plan, steps)
        assert tokens == expected, f"{name} gives other tokens"
        print(f"{name:10} {1e3 * per_step[name]:6.2f} ms a step", flush=True)
    saved = per_step["inprocess"] - per_step["threaded"]
    print(f"ratio {per_step['threaded'] / per_step['inprocess']:.2f}, {saved / plan:.0%} of the planning is hidden")


if __name__ == "__main__":
    main()
