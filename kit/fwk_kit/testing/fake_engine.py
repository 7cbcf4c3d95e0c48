"""An engine without a model: its K/V memory holds token ids, and the next token is a hash of what it reads back.

Whatever is wrong in the accounting of blocks (a block given to two, freed too early, shared with other content, not
computed) changes what is read, and so the output.
"""

from __future__ import annotations

import copy
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from fwk.engine.checked_cache import CheckedCache
from fwk.engine.core import Engine, EngineInfo
from fwk.engine.gate import CacheGate
from fwk.engine.kv_block_manager import KVBlockManager
from fwk.engine.plan import Limits
from fwk.engine.scheduler import Scheduler
from fwk.interfaces.declaration import Facts
from fwk.interfaces.executor import Executor, Worker, WorkerInfo
from fwk.interfaces.prefix_cache import BlockTransfer, CacheContext
from fwk.interfaces.schedule import ScheduleContext, SchedulePolicy
from fwk.plugins import PluginSet, Registered, build, choose
from fwk.plugins.selection import plugin_options
from fwk.types import Batch, ScheduledSequence, SequenceResult, StepResult
from fwk.worker.runner.sequence_table import SequenceTable
from fwk_kit.testing.base import installed

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


class Tiers(Protocol):
    """Cache tiers for the fake memory, with a plugin's code."""

    def store(self, blocks: torch.Tensor) -> Any:
        """``FakeWorker.store``; blocks: [num_blocks, block_size]."""
        ...

    def transfer(self, call: Callable[..., list[Any]]) -> BlockTransfer:
        """As ``FeatureSpec.transfer`` names one."""
        ...


class FakeWorker(Worker):
    """Writes tokens to the slots a batch names and reads them back through the block table."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        max_len: int,
        draft: Draft | None,
        num_window_groups: int = 0,
        window: int = 0,
        num_state_places: int | None = None,
    ) -> None:
        has_states = num_state_places is not None
        self.table = SequenceTable(num_slots, max_len, block_size, 1 + num_window_groups, has_states=has_states)
        self.num_lookahead = NUM_LOOKAHEAD  # 0: drafts are not a model's
        self.window = window
        self.states = np.zeros(num_slots, np.int64)
        self.kept = None if num_state_places is None else np.zeros(num_state_places, np.int64)
        self.memory = np.full(num_blocks * block_size, UNWRITTEN, np.int64)
        self.num_blocks = num_blocks
        self.draft = draft
        self.batches: list[Batch] = []
        self.store: Any = None
        """Keeps blocks in tiers, too: has ``save``, and as methods what ``Tiers.transfer`` calls."""

    def load(self) -> WorkerInfo:
        return WorkerInfo(self.num_blocks, VOCAB, {})

    def _slots(self, slot: int, start: int, end: int, group: int = 0) -> np.ndarray:
        return self.table.kv_slots(slot, np.arange(start, end), group)

    def _written(self, slot: int, start: int, end: int, group: int) -> np.ndarray:
        """What the K/V of some tokens are, unlike those of other groups and, in window groups, of other positions."""
        return self.table.token_ids[slot, start:end] + VOCAB * group * (1 + np.arange(start, end))

    def execute(self, batch: Batch) -> StepResult:
        self.batches.append(batch)
        if self.store is None or batch.saves is None:
            return self._run(batch)
        self.store.save(batch.saves.before)
        result = self._run(batch)
        self.store.save(batch.saves.after)
        return result

    def _run(self, batch: Batch) -> StepResult:
        table = self.table
        table.begin(batch)
        starts = {s.slot: int(table.num_computed[s.slot]) for s in batch.sequences}
        self._begin_states(batch)
        for s in batch.sequences:  # all of a step's K/V is stored before any is read
            start, end = starts[s.slot], starts[s.slot] + s.num_new_tokens
            for group in range(len(table.block_tables)):
                self.memory[self._slots(s.slot, start, end, group)] = self._written(s.slot, start, end, group)
        results: list[SequenceResult] = []
        for s in batch.sequences:
            end = starts[s.slot] + s.num_new_tokens
            before = self.states[s.slot]
            seen = self.memory[self._slots(s.slot, 0, end)].tolist()
            self._advance_state(s, table.token_ids[s.slot, :end], starts[s.slot])
            first = max(0, starts[s.slot] - self.window + 1)
            for group in range(1, len(table.block_tables)):
                windowed = self.memory[self._slots(s.slot, first, end, group)]
                wanted = self._written(s.slot, first, end, group)
                assert (windowed == wanted).all(), f"group {group} of slot {s.slot} lost K/V inside its window"
            tokens: list[int] = []
            if s.samples:
                count = len(s.draft_token_ids)
                picked = [next_token(seen[: end - count + i]) for i in range(count + 1)]
                wrong = (i for i, draft in enumerate(s.draft_token_ids) if draft != picked[i])
                tokens = picked[: 1 + next(wrong, count)]
            table.finish(s, tokens)
            if table.is_undone(s, tokens):
                self.states[s.slot] = before
            if s.samples:
                known = table.token_ids[s.slot, : table.num_tokens[s.slot]].tolist()
                room = table.token_ids.shape[1] - 1 - len(known)
                drafts = self.draft(known)[: min(max(room, 0), NUM_LOOKAHEAD)] if self.draft else []
                end = min(len(known) - 1 + len(drafts), int(table.num_blocks[s.slot]) * table.block_size)
                if end > len(known) - 1 and self.num_lookahead:  # a draft model writes here
                    self.memory[self._slots(s.slot, len(known) - 1, end)] = UNWRITTEN
                results.append(SequenceResult(s.slot, tokens, draft_token_ids=drafts))
        seconds = (10 + sum(scheduled.num_new_tokens for scheduled in batch.sequences)) / 1000
        return StepResult(batch.step, results, total_seconds=seconds)

    def _begin_states(self, batch: Batch) -> None:
        if self.kept is None:
            return
        for new in batch.new:
            assert (new.state_source < 0) == (new.num_computed_tokens == 0)
            self.states[new.slot] = 0 if new.state_source < 0 else self.kept[new.state_source]

    def _advance_state(self, s: ScheduledSequence, token_ids: np.ndarray, start: int) -> None:
        """A recurrent state is a hash of all tokens it has seen, one after another."""
        if self.kept is None:
            return
        self.states[s.slot] = zlib.crc32(token_ids[start:].tobytes(), int(self.states[s.slot]))
        assert self.states[s.slot] == zlib.crc32(token_ids.tobytes()), f"slot {s.slot} has another sequence's state"
        if s.state_place >= 0:
            self.kept[s.state_place] = self.states[s.slot]

    def call(self, name: str, *args: Any) -> Any:
        assert self.store is not None
        return getattr(self.store, name)(*args)


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
        return [self.worker.call(name, *args)]

    def close(self) -> None: ...


class LateExecutor(FakeExecutor):
    """Runs a step as late as it may: when its result is wanted, or something that comes after it."""

    def __init__(self, worker: FakeWorker, depth: int = 1) -> None:
        super().__init__(worker, depth)
        self._launched: list[Batch] = []
        self._results: dict[int, StepResult] = {}

    def launch(self, batch: Batch) -> StepResult:
        self._launched.append(copy.deepcopy(batch))
        return StepResult(batch.step, [])

    def collect(self, pending: StepResult) -> StepResult:
        while pending.step not in self._results:
            self._run_one()
        return self._results.pop(pending.step)

    def call(self, name: str, *args: Any) -> list[Any]:
        while self._launched:
            self._run_one()
        return super().call(name, *args)

    def _run_one(self) -> None:
        result = self.worker.execute(self._launched.pop(0))
        self._results[result.step] = result


def _take(plugins: PluginSet, family: str, name: str) -> Registered:
    item = choose(plugins, family, name, Facts()).chosen
    assert item is not None
    return item


def make_policy(name: str, options: Mapping[str, object] | None = None) -> SchedulePolicy:
    """A schedule policy, as an engine builds it."""
    item = _take(installed(), "schedulers", name)
    return build(item, ScheduleContext(plugin_options(item, {item.key: options or {}})))


def make_engine(  # noqa: PLR0913 - a test names the few settings it is about
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_running: int = 8,
    max_len: int = 256,
    step_tokens: int = 32,
    chunk_tokens: int | None = 32,
    cache: str = "auto",
    policy: str = "auto",
    policy_object: Any = None,
    policy_options: Mapping[str, object] | None = None,
    now: Callable[[], float] | None = None,
    depth: int = 1,
    draft: Draft | None = None,
    num_lookahead: int = NUM_LOOKAHEAD,
    eos: frozenset[int] = frozenset(),
    cache_options: Mapping[str, object] | None = None,
    tiers: Tiers | None = None,
    is_late: bool = False,
    keeps_policy: bool = True,
    keeps_cache: bool = True,
    **limits: Any,
) -> Engine:
    """An engine on a fake worker, with the real scheduler, cache and policy, checking its books every step.

    keeps_policy, keeps_cache: one that fails ends the engine, where others replace it or leave it out.
    """
    plugins = installed()
    cache_item = _take(plugins, "cache", cache)
    groups, window = limits.get("num_window_groups", 0), limits.get("window", 0)
    states = limits.get("num_state_places")
    worker = FakeWorker(num_blocks, block_size, max_running, max_len, draft, groups, window, states)
    worker.num_lookahead = num_lookahead
    if tiers is not None:
        worker.store = tiers.store(torch.from_numpy(worker.memory).view(num_blocks, -1))
    executor = (LateExecutor if is_late else FakeExecutor)(worker, depth)
    own = plugin_options(cache_item, {cache_item.key: cache_options or {}})

    def failed(why: str) -> None:
        if keeps_cache:
            raise AssertionError(why)
        scheduler.parts.trouble(why)

    transfer = None if tiers is None else tiers.transfer(executor.call)
    built = build(cache_item, CacheContext(block_size, own, transfer))
    cache_object = CheckedCache(built, block_size, cache_item.label, lambda: scheduler.shared_blocks, failed)
    policy_object = policy_object or make_policy(policy, policy_options)
    limits_object = Limits(
        max_model_len=max_len,
        max_step_tokens=step_tokens,
        max_chunk_tokens=chunk_tokens,
        max_running=max_running,
        block_size=block_size,
        eos_token_ids=eos,
        num_lookahead=num_lookahead if draft else 0,
        **{"check_blocks": True, **limits},
    )
    clock = itertools.count()
    scheduler = Scheduler(
        limits_object,
        KVBlockManager(limits_object, num_blocks, cache_object),
        policy_object,
        now=now or (lambda: float(next(clock))),
        gates=(CacheGate(cache_object),),
        keeps_policy=keeps_policy,
    )
    info = EngineInfo(num_blocks, 1 + limits_object.num_window_groups, block_size, max_len, VOCAB, {}, [])
    return Engine(scheduler, executor, info)
