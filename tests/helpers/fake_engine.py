"""An engine without a model: its K/V memory holds token ids, and the next token is a hash of what it reads back.

Whatever is wrong in the accounting of blocks (a block given to two, freed too early, shared with other content, not
computed) changes what is read, and so the output.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fwk.engine.blocks import BlockAllocator
from fwk.engine.core import Engine, EngineInfo
from fwk.engine.plan import Limits
from fwk.engine.scheduler import Scheduler
from fwk.interfaces.cache import CacheContext
from fwk.interfaces.executor import Executor, Worker, WorkerInfo
from fwk.interfaces.schedule import ScheduleContext
from fwk.plugins import PluginSet, build, discover, find
from fwk.plugins.selection import plugin_options
from fwk.types import Batch, SequenceResult, StepResult
from fwk.worker.table import SequenceTable
from fwk.worker.verify import accepted

VOCAB = 97
UNWRITTEN = -1
NUM_LOOKAHEAD = 5

Draft = Callable[[list[int]], list[int]]


def next_token(token_ids: Sequence[int]) -> int:
    """What the fake model says after these tokens."""
    return zlib.crc32(np.asarray(token_ids, np.int32).tobytes()) % VOCAB


def reference(prompt: Sequence[int], max_tokens: int, stop: frozenset[int] = frozenset()) -> list[int]:
    """The output the engine must give, whatever happened on the way."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


class FakeWorker(Worker):
    """Writes tokens to the slots a batch names and reads them back through the block table."""

    def __init__(self, num_blocks: int, block_size: int, num_slots: int, max_len: int, draft: Draft | None) -> None:
        self.table = SequenceTable(num_slots, max_len, block_size)
        self.memory = np.full(num_blocks * block_size, UNWRITTEN, np.int64)
        self.num_blocks = num_blocks
        self.draft = draft
        self.batches: list[Batch] = []

    def load(self) -> WorkerInfo:
        return WorkerInfo(self.num_blocks, VOCAB, {})

    def _slots(self, slot: int, start: int, end: int) -> np.ndarray:
        positions = np.arange(start, end)
        size = self.table.block_size
        return self.table.block_table[slot, positions // size].astype(np.int64) * size + positions % size

    def execute(self, batch: Batch) -> StepResult:
        self.batches.append(batch)
        table = self.table
        table.begin(batch)
        starts = {s.slot: int(table.num_computed[s.slot]) for s in batch.sequences}
        for s in batch.sequences:  # all of a step's K/V is stored before any is read
            start, end = starts[s.slot], starts[s.slot] + s.num_new_tokens
            self.memory[self._slots(s.slot, start, end)] = table.token_ids[s.slot, start:end]
        results: list[SequenceResult] = []
        for s in batch.sequences:
            end = starts[s.slot] + s.num_new_tokens
            seen = self.memory[self._slots(s.slot, 0, end)].tolist()
            tokens: list[int] = []
            if s.samples:
                count = len(s.draft_token_ids)
                picked = [next_token(seen[: end - count + i]) for i in range(count + 1)]
                tokens = accepted(s.draft_token_ids, picked)
            table.finish(s, tokens)
            if s.samples:
                known = table.token_ids[s.slot, : table.num_tokens[s.slot]].tolist()
                room = table.token_ids.shape[1] - 1 - len(known)
                drafts = self.draft(known)[: min(max(room, 0), NUM_LOOKAHEAD)] if self.draft else []
                end = min(len(known) - 1 + len(drafts), int(table.num_blocks[s.slot]) * table.block_size)
                if end > len(known) - 1:  # a draft model writes here
                    self.memory[self._slots(s.slot, len(known) - 1, end)] = UNWRITTEN
                results.append(SequenceResult(s.slot, tokens, draft_token_ids=drafts))
        return StepResult(batch.step, results)

    def call(self, name: str, *args: Any) -> Any:
        raise AssertionError(name)


class FakeExecutor(Executor):
    """Runs a fake worker; with depth 2 a result is handed out only after the next step was launched."""

    def __init__(self, worker: FakeWorker, depth: int = 1) -> None:
        self.worker = worker
        self.depth = depth

    def load(self) -> WorkerInfo:
        return self.worker.load()

    def launch(self, batch: Batch) -> StepResult:
        return self.worker.execute(batch)

    def collect(self, pending: StepResult) -> StepResult:
        return pending

    def call(self, name: str, *args: Any) -> list[Any]:
        return []

    def close(self) -> None: ...


_PLUGINS: list[PluginSet] = []


def installed() -> PluginSet:
    """The installed plugins, discovered once for the test run."""
    if not _PLUGINS:
        _PLUGINS.append(discover())
    return _PLUGINS[0]


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_running: int = 8,
    max_len: int = 256,
    step_tokens: int = 32,
    chunk_tokens: int = 32,
    cache: str = "radix",
    policy: str = "fcfs",
    policy_object: Any = None,
    depth: int = 1,
    draft: Draft | None = None,
    eos: frozenset[int] = frozenset(),
) -> Engine:
    """An engine on a fake worker, with the real scheduler, cache and policy, checking its books every step."""
    plugins = installed()
    cache_item, policy_item = find(plugins, "cache", cache), find(plugins, "schedulers", policy)
    cache_object = build(cache_item, CacheContext(block_size, plugin_options(cache_item, {})))
    policy_object = policy_object or build(policy_item, ScheduleContext(plugin_options(policy_item, {})))
    limits = Limits(
        max_model_len=max_len,
        max_step_tokens=step_tokens,
        max_chunk_tokens=chunk_tokens,
        max_running=max_running,
        block_size=block_size,
        eos_token_ids=eos,
        num_lookahead=NUM_LOOKAHEAD if draft else 0,
        check_blocks=True,
    )
    clock = iter(range(10**9))
    scheduler = Scheduler(
        limits, BlockAllocator(num_blocks, cache_object), cache_object, policy_object, now=lambda: float(next(clock))
    )
    worker = FakeWorker(num_blocks, block_size, max_running, max_len, draft)
    info = EngineInfo(num_blocks, block_size, max_len, VOCAB, {}, [])
    return Engine(scheduler, FakeExecutor(worker, depth), info)
