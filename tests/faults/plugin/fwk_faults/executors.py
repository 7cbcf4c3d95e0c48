"""An executor without a model, and one around the real worker; both misbehave on request."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import xxhash

from fwk.interfaces.executor import Executor, ExecutorContext, WorkerInfo
from fwk.interfaces.parallel import SingleRank
from fwk.types import Batch, SequenceResult, StepResult
from fwk.worker.runner.sequence_table import SequenceTable
from fwk_faults import FakeOptions, Fault, asked

VOCAB, NUM_SLOTS, MAX_LEN, BLOCK_SIZE = 512, 256, 2048, 16
SLEEP_SECONDS = 2.0
EXIT_CODE = 99


class Turns:
    """Counts the steps of sequences whose request asks for a fault, and commits it when its turn has come."""

    def __init__(self) -> None:
        self._left: dict[int, tuple[str, int]] = {}

    def count(self, batch: Batch) -> None:
        for slot in batch.freed_slots:
            self._left.pop(slot, None)
        for new in batch.new:
            fault = asked(new.sampling.extra, "model", "sleep", "exit")
            if fault is not None:
                self._left[new.slot] = fault
        for scheduled in batch.sequences:
            place, turn = self._left.get(scheduled.slot, ("", 0))
            self._left[scheduled.slot] = place, turn - 1
            if place and turn == 1:
                self._commit(place)

    def _commit(self, place: str) -> None:
        if place == "exit":
            os._exit(EXIT_CODE)
        if place == "model":
            raise Fault
        time.sleep(SLEEP_SECONDS)


class FakeExecutor(Executor):
    """Its K/V memory holds token ids and the next token is a hash of all that it reads back, as a letter.

    Whatever is wrong in the accounting of blocks changes what is read, and so the text.
    """

    def __init__(self, context: ExecutorContext) -> None:
        super().__init__(context)
        self._options = context.options or FakeOptions()
        self._table = SequenceTable(NUM_SLOTS, MAX_LEN, BLOCK_SIZE)
        self._memory = np.full(self._options.fake_blocks * BLOCK_SIZE, -1, np.int32)
        self._turns = Turns()

    def load(self) -> WorkerInfo:
        return WorkerInfo(self._options.fake_blocks, VOCAB, {})

    def launch(self, batch: Batch) -> StepResult:
        self._turns.count(batch)
        time.sleep(self._options.fake_step_ms / 1000)
        table = self._table
        table.begin(batch)
        for s in batch.sequences:  # all of a step's K/V is stored before any is read
            start = int(table.num_computed[s.slot])
            end = start + s.num_new_tokens
            self._memory[self._places(s.slot, start, end)] = table.token_ids[s.slot, start:end]
        results: list[SequenceResult] = []
        for s in batch.sequences:
            end = int(table.num_computed[s.slot]) + s.num_new_tokens
            tokens = [self._next(s.slot, end)] if s.samples else []
            table.finish(s, tokens)
            if s.samples:
                results.append(SequenceResult(s.slot, tokens))
        return StepResult(batch.step, results)

    def _places(self, slot: int, start: int, end: int) -> np.ndarray:
        positions = np.arange(start, end)
        blocks = self._table.block_table[slot, positions // BLOCK_SIZE].astype(np.int64)
        return blocks * BLOCK_SIZE + positions % BLOCK_SIZE

    def _next(self, slot: int, end: int) -> int:
        seen = self._memory[self._places(slot, 0, end)]
        return ord("a") + xxhash.xxh32(seen.tobytes()).intdigest() % 26

    def collect(self, pending: StepResult) -> StepResult:
        return pending

    def call(self, name: str, *args: Any) -> list[Any]:
        return []

    def close(self) -> None:
        """Nothing to stop."""


class FaultyExecutor(Executor):
    """The real worker in this process, and faults between its steps."""

    def __init__(self, context: ExecutorContext) -> None:
        super().__init__(context)
        self._worker = context.make_worker(SingleRank())
        self._turns = Turns()

    def load(self) -> WorkerInfo:
        return self._worker.load()

    def launch(self, batch: Batch) -> StepResult:
        self._turns.count(batch)
        return self._worker.execute(batch)

    def collect(self, pending: StepResult) -> StepResult:
        return pending

    def call(self, name: str, *args: Any) -> list[Any]:
        return [self._worker.call(name, *args)]

    def close(self) -> None:
        """Nothing to stop."""
