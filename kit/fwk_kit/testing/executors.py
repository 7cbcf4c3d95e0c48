"""What every executor must do."""

from __future__ import annotations

import time
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fwk.errors import InvalidRequest
from fwk.interfaces.executor import Executor, ExecutorContext, ExecutorSpec, Worker, WorkerInfo, WorkerRecipe
from fwk.interfaces.parallel import ParallelGroup
from fwk.plugins import Registered
from fwk.types import Batch, NewSequence, SamplingParams, ScheduledSequence, SequenceResult, StepResult
from fwk_kit.testing.served import ServedSuite

VOCAB = 97


def next_token(token_ids: list[int]) -> int:
    """What the scripted worker says after these tokens."""
    return zlib.crc32(array("i", token_ids).tobytes()) % VOCAB


class ScriptedWorker(Worker):
    """Says a hash of what it has seen; needs no torch, so it starts at once in any process."""

    def __init__(self, config: dict[str, Any], group: ParallelGroup) -> None:
        self._fails_at = config.get("fails_at", -1)
        self._group = group
        self._tokens: dict[int, list[int]] = {}
        self._steps: list[int] = []
        self._is_loaded = False

    def load(self) -> WorkerInfo:
        self._is_loaded = True
        return WorkerInfo(64, VOCAB, {})

    def execute(self, batch: Batch) -> StepResult:
        self._steps.append(batch.step)
        if batch.step == self._fails_at:
            raise ZeroDivisionError("a fault of the suite")
        for new in batch.new:
            self._tokens[new.slot] = list(new.token_ids)
        results: list[SequenceResult] = []
        for sequence in batch.sequences:
            tokens = self._tokens[sequence.slot]
            tokens.append(next_token(tokens))
            results.append(SequenceResult(sequence.slot, tokens[-1:]))
        return StepResult(batch.step, results)

    def call(self, name: str, *args: Any) -> Any:
        if name == "refuse":
            raise InvalidRequest("not this one", "name")
        return [name, self._group.rank, self._group.size, list(self._steps), *args]


def make(config: dict[str, Any], group: ParallelGroup) -> Worker:
    """For a recipe: in another process."""
    return ScriptedWorker(config, group)


def step(number: int, new: list[int] | None = None) -> Batch:
    """A step of one sequence in slot 0, which begins with the tokens ``new``."""
    if new is None:
        return Batch(number, [], [], [ScheduledSequence(0, 1, True, [], [])])
    sequence = NewSequence(0, new, len(new), 0, [], SamplingParams(), 1)
    return Batch(number, [], [sequence], [ScheduledSequence(0, len(new), True, [0, 1, 2, 3], [])])


class ExecutorSuite(ServedSuite):
    """Steps in order, on as many workers as it says, and a loud end when one fails."""

    family = "executors"
    interface = Executor

    @contextmanager
    def executor(self, item: Registered, **config: Any) -> Iterator[Executor]:
        """One over scripted workers, here or in other processes; closed twice."""
        assert isinstance(item.declaration, ExecutorSpec)
        size = 1 if item.declaration.max_tp_size == 1 else 2
        context = ExecutorContext(
            lambda group: ScriptedWorker(config, group),
            WorkerRecipe(f"{__name__}:make", config),
            size,
            self.given(item),
            step_timeout=60.0,
        )
        made: Executor = self.make(item, context)
        try:
            yield made
        finally:
            started = time.monotonic()
            made.close()
            made.close()
            assert time.monotonic() - started < 30, "close() hangs"

    def exercise(self, item: Registered) -> None:
        self.test_steps_come_back_in_order(item)

    def test_steps_come_back_in_order(self, item: Registered) -> None:
        with self.executor(item) as executor:
            assert executor.load().num_blocks == 64
            assert executor.depth >= 1
            tokens = [5, 6, 7]
            pending: list[Any] = []
            collected = 0
            for number in range(1, 9):
                pending.append(executor.launch(step(number, list(tokens) if number == 1 else None)))
                if len(pending) >= executor.depth:
                    collected += 1
                    result = executor.collect(pending.pop(0))
                    assert result.step == collected
                    tokens.append(next_token(tokens))
                    assert [one.token_ids for one in result.sequences] == [[tokens[-1]]]
            executor.check()

    def test_a_call_comes_after_what_was_launched_and_before_what_follows(self, item: Registered) -> None:
        with self.executor(item) as executor:
            executor.load()
            handle = executor.launch(step(1, [1]))
            answers = executor.call("where", "x", 3)
            assert [answer[1] for answer in answers] == list(range(len(answers))), "answers come in order of ranks"
            assert all(answer[3] == [1] and answer[4:] == ["x", 3] for answer in answers)
            executor.collect(handle)
            executor.collect(executor.launch(step(2)))

    def test_a_refused_operation_harms_nothing(self, item: Registered) -> None:
        with self.executor(item) as executor:
            executor.load()
            with pytest.raises(InvalidRequest, match="not this one"):
                executor.call("refuse")
            assert executor.collect(executor.launch(step(1, [1]))).step == 1

    def test_a_failing_step_is_raised(self, item: Registered) -> None:
        with self.executor(item, fails_at=2) as executor:
            executor.load()
            executor.collect(executor.launch(step(1, [1])))
            with pytest.raises(Exception, match=r"\S"):
                executor.collect(executor.launch(step(2)))

    def test_closing_what_was_never_loaded(self, item: Registered) -> None:
        with self.executor(item):
            pass

    def test_two_engines_do_not_share(self, item: Registered) -> None:
        with self.executor(item) as one, self.executor(item) as two:
            for executor, prompt in ((one, [1, 2]), (two, [9])):
                executor.load()
                result = executor.collect(executor.launch(step(1, prompt)))
                assert result.sequences[0].token_ids == [next_token(prompt)]
            assert one.call("where")[0][3] == two.call("where")[0][3] == [1]
