"""The threaded executor: steps run in order on one thread, planning goes ahead, failures are loud, closing is quick."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.scripted_decoder import EchoDecoder, EchoPlugin

import fwk
from fwk import SamplingParams
from fwk.engine.core import Engine
from fwk.errors import EngineDead
from fwk.interfaces.executor import ExecutorContext, Worker, WorkerInfo, WorkerRecipe
from fwk.interfaces.parallel import ParallelGroup
from fwk.plugins import discover, load_object
from fwk.plugins.selection import find
from fwk.types import Batch, Request, StepResult
from fwk_kit.testing.fake_engine import FakeExecutor, FakeWorker, make_engine, next_token, reference

NO_RECIPE = WorkerRecipe("nothing:nobody", {})
SECONDS = 20.0
"""Nothing here takes that long; what would hang, fails."""


class GatedWorker(Worker):
    """The fake worker, whose steps can be held up until the test lets them go."""

    def __init__(self, inner: FakeWorker) -> None:
        self.inner = inner
        self.gate = threading.Event()
        self.gate.set()
        self.started: list[int] = []
        self.threads: set[str] = set()
        self.fail_at: int | None = None
        self.calls: list[str] = []

    def load(self) -> WorkerInfo:
        self.threads.add(threading.current_thread().name)
        return self.inner.load()

    def execute(self, batch: Batch) -> StepResult:
        self.threads.add(threading.current_thread().name)
        self.started.append(batch.step)
        assert self.gate.wait(SECONDS), "nobody opened the gate"
        if batch.step == self.fail_at:
            raise ZeroDivisionError("a fault of the test")
        return self.inner.execute(batch)

    def call(self, name: str, *args: Any) -> Any:
        self.calls.append(name)
        if name == "bad":
            raise KeyError(name)
        return (name, *args, len(self.started))


Make = Callable[..., tuple[Engine, GatedWorker]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Engines with the threaded executor around a gated fake worker."""
    engines: list[tuple[Engine, GatedWorker]] = []

    def build(*, is_overlapped: bool = True, **options: Any) -> tuple[Engine, GatedWorker]:
        plain = make_engine(**options)
        assert isinstance(plain.executor, FakeExecutor)
        worker = GatedWorker(plain.executor.worker)
        cls = load_object(find(discover(), "executors", "threaded"))
        executor = cls(ExecutorContext(lambda group: worker, NO_RECIPE))
        executor.load()
        engine = Engine(plain.scheduler, executor, plain.info, is_overlapped=is_overlapped)
        engines.append((engine, worker))
        return engine, worker

    yield build
    for engine, worker in engines:
        worker.gate.set()
        engine.close()


def add(engine: Engine, prompt: list[int], max_tokens: int, name: str = "r") -> None:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    engine.add(Request(request_id=name, prompt_token_ids=prompt, sampling=sampling))


def finish(engine: Engine) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            found.setdefault(event.request_id, []).extend(event.token_ids)
    return found


def test_the_next_step_is_planned_and_launched_while_one_runs(make: Make) -> None:
    engine, worker = make()
    add(engine, [1, 2, 3], 8)
    worker.gate.clear()
    assert engine.step() == []  # returns although the worker is held up in step 1
    steps: list[tuple[str, int]] = []
    schedule, collect = engine.scheduler.schedule, engine.executor.collect

    def noted_schedule() -> Any:
        step = schedule()
        steps.append(("planned", step.batch.step if step else 0))
        return step

    def noted_collect(pending: Any) -> StepResult:
        assert not pending.done(), "step 1 is held up, so whatever was planned by now was planned meanwhile"
        worker.gate.set()
        result = collect(pending)
        steps.append(("back", result.step))
        return result

    engine.scheduler.schedule, engine.executor.collect = noted_schedule, noted_collect  # type: ignore[method-assign]
    [event] = engine.step()
    assert steps == [("planned", 2), ("back", 1)]
    assert event.token_ids == [next_token([1, 2, 3])]


def test_without_overlap_every_step_comes_back_first(make: Make) -> None:
    engine, worker = make(is_overlapped=False)
    add(engine, [1, 2, 3], 3)
    for number in (1, 2, 3):
        assert len(engine.step()) == 1
        assert worker.started == list(range(1, number + 1))
    assert not engine.has_work


@pytest.mark.parametrize("options", [{}, {"num_blocks": 18, "chunk_tokens": 3}, {"cache": "none", "step_tokens": 5}])
def test_tokens_are_those_of_the_plain_loop(make: Make, options: dict[str, Any]) -> None:
    engine, worker = make(**options)
    prompts = {f"r{i}": [(i * 7 + j) % 90 for j in range(3 + 4 * i)] for i in range(7)}
    for name, prompt in prompts.items():
        add(engine, prompt, 12, name)
    assert finish(engine) == {name: reference(prompt, 12) for name, prompt in prompts.items()}
    assert worker.started == sorted(worker.started)
    assert worker.threads == {"fwk-worker"}
    if "num_blocks" in options:
        assert engine.stats().preemptions > 0


def test_a_failed_step_fails_those_behind_it_and_is_raised(make: Make) -> None:
    engine, worker = make()
    worker.fail_at = 3
    add(engine, [1, 2, 3], 20)
    with pytest.raises(ZeroDivisionError, match="a fault of the test"):
        finish(engine)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert 4 not in worker.started, "nothing may run on a worker that is not usable"


def test_operations_run_between_the_steps(make: Make) -> None:
    engine, worker = make()
    add(engine, [1, 2, 3], 6)
    engine.step()
    engine.step()
    assert engine.executor.call("look", 5) == [("look", 5, 2)]
    with pytest.raises(KeyError):
        engine.executor.call("bad")
    assert finish(engine)["r"] == reference([1, 2, 3], 6)[1:], "an operation that fails harms no step"
    assert worker.calls == ["look", "bad"]


def test_closing_never_waits_for_a_step_that_hangs(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, worker = make()
    monkeypatch.setitem(type(engine.executor).close.__globals__, "CLOSE_SECONDS", 0.1)
    add(engine, [1, 2, 3], 6)
    worker.gate.clear()
    engine.step()
    started = time.monotonic()
    while not worker.started:
        assert time.monotonic() - started < SECONDS
        time.sleep(0.001)
    started = time.monotonic()
    engine.executor.launch(Batch(2, [], [], []))
    engine.close()
    engine.close()
    assert time.monotonic() - started < SECONDS / 2
    with pytest.raises(EngineDead):
        engine.step()
    worker.gate.set()
    engine.executor._thread.join(SECONDS)  # type: ignore[attr-defined]
    assert worker.started == [1], "a step launched before closing that had not begun does not run"


def test_a_worker_that_cannot_load_says_why_in_the_callers_thread() -> None:
    cls = load_object(find(discover(), "executors", "threaded"))

    def refuse(group: ParallelGroup) -> Worker:
        raise OSError("no such device")

    executor = cls(ExecutorContext(refuse, NO_RECIPE))
    with pytest.raises(OSError, match="no such device"):
        executor.load()
    executor.close()


PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, 40, 1, 90)]


def test_a_real_model_says_the_same(tiny_llm: Callable[..., fwk.LLM]) -> None:
    settings = [
        SamplingParams(max_tokens=12, temperature=t, seed=7, ignore_eos=True, logprobs=2, prompt_logprobs=1)
        for t in (0.0, 1.0, 0.0, 1.0, 0.0)
    ]
    options = {"max_total_tokens": 128, "page_size": 4, "chunked_prefill_size": 16, "prefix_cache": "none"}
    plain, threaded = tiny_llm(**options), tiny_llm(executor="threaded", **options)
    assert threaded.engine.info.chosen["executors"] == "threaded"
    expected, found = plain.generate(PROMPTS, settings), threaded.generate(PROMPTS, settings)
    assert [done.token_ids for done in found] == [done.token_ids for done in expected]
    assert [done.prompt_logprobs for done in found] == [done.prompt_logprobs for done in expected]
    assert threaded.engine.stats().preemptions > 0


def test_drafts_are_used(tiny_llm: Callable[..., fwk.LLM], tiny_folder: Path) -> None:
    sampling = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    expected = tiny_llm().generate(PROMPTS, sampling)
    plugins = discover()
    plugins.register(EchoPlugin(), "speculative.echo", "tests", "1")
    options: dict[str, Any] = {"executor": "threaded", "speculative_algorithm": "echo", "max_total_tokens": 2048}
    with fwk.LLM(str(tiny_folder), load_format="dummy", plugins=plugins, **options) as llm:
        found = llm.generate(PROMPTS, sampling)
    assert [done.token_ids for done in found] == [done.token_ids for done in expected]
    assert sum(accepted for _, accepted in EchoDecoder.verified) > 0
