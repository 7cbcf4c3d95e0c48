"""What tests of executors of processes share."""

from __future__ import annotations

import time
from typing import Any

from fwk import SamplingParams
from fwk.engine.core import Engine
from fwk.interfaces.executor import Worker
from fwk.interfaces.parallel import ParallelGroup
from fwk.plugins import discover
from fwk.plugins.selection import find
from fwk.types import Batch, NewSequence, Request, ScheduledSequence
from fwk_kit.testing.fake_engine import make_engine

SECONDS = 30.0

ITEM = find(discover(), "executors", "processes")


def nobody(group: ParallelGroup) -> Worker:
    raise AssertionError("no worker is made in this process")


def batch(step: int, new: list[int] | None = None) -> Batch:
    """A step of one sequence in slot 0, which begins with the tokens ``new``."""
    if new is None:
        return Batch(step, [], [], [ScheduledSequence(0, 1, True, [], [])])
    sequence = NewSequence(0, new, len(new), 0, [], SamplingParams(), 1)
    blocks = list(range(-(-(len(new) + 8) // 4)))
    return Batch(step, [], [sequence], [ScheduledSequence(0, len(new), True, blocks, [])])


def wait_idle(executor: Any) -> None:
    """What the engine's loop does without work."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        executor.check()
        time.sleep(0.01)


def run_engine(executor: Any, prompts: dict[str, list[int]], **options: Any) -> tuple[Engine, dict[str, list[int]]]:
    plain = make_engine(**options)
    engine = Engine(plain.scheduler, executor, plain.info)
    sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    for name, prompt in prompts.items():
        engine.add(Request(request_id=name, prompt_token_ids=prompt, sampling=sampling))
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            found.setdefault(event.request_id, []).extend(event.token_ids)
    return engine, found
