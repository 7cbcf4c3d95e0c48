"""What planning a step costs as the queue and the prefix cache grow.

    python -m benchmarks.scheduling_cost [--steps 300] [--running 32] [--policies fcfs,lpm]

The real scheduler, block allocator, radix cache and policies, without a model: each sampled token is a constant. Two
kinds of step: "decode", in which every slot is taken and continues; and "turnover", in which a sequence ends, the next
is matched against the cache and started, blocks are evicted for it when the cache is full, and another one arrives.
Times are medians of ``schedule`` + ``update`` (and ``add`` in a turnover), microseconds a step.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

from fwk import SamplingParams
from fwk.engine.blocks import BlockAllocator
from fwk.engine.kv_block_manager import KVBlockManager
from fwk.engine.plan import Limits
from fwk.engine.scheduler import Scheduler
from fwk.interfaces.prefix_cache import CacheContext, PrefixCache
from fwk.interfaces.schedule import ScheduleContext
from fwk.plugins import build, discover, find
from fwk.plugins.selection import plugin_options
from fwk.types import Request, SequenceResult, StepResult

BLOCK = 16
PROMPT = 64
ENDLESS = 100_000
QUEUES = (1, 10, 100, 1_000, 10_000)
CACHED = (0, 100, 1_000, 10_000, 100_000)


class Bench:
    """A scheduler with ``running`` sequences under way, ``queued`` that wait and ``cached`` prefixes of one block."""

    def __init__(self, policy: str, running: int, queued: int, cached: int, max_tokens: int | None) -> None:
        plugins = discover()
        cache_item, policy_item = find(plugins, "cache", "radix"), find(plugins, "schedulers", policy)
        own = plugin_options(cache_item, {})
        self.cache: PrefixCache = build(cache_item, CacheContext(BLOCK, own))
        num_blocks = cached + running * (PROMPT // BLOCK + 300)
        limits = Limits(2 * ENDLESS, 8192, 2048, running, BLOCK, frozenset())
        blocks = KVBlockManager(limits, num_blocks, self.cache)
        rules = build(policy_item, ScheduleContext(plugin_options(policy_item, {})))
        self.scheduler = Scheduler(limits, blocks, rules)
        self.num_added = 0
        for i in range(cached):
            self._cache_prefix(i, blocks.allocator)
        for i in range(running):  # they end one after the other
            self.add(ENDLESS if max_tokens is None else i + 2)
        self.step()
        for _ in range(queued):
            self.add(max_tokens or ENDLESS)

    def _cache_prefix(self, number: int, allocator: BlockAllocator) -> None:
        root = self.cache.match("", [], 0).node
        self.cache.lock(root)
        node, _ = self.cache.insert(root, [number, *range(BLOCK - 1)], allocator.allocate(1))
        self.cache.unlock(node)

    def add(self, max_tokens: int) -> None:
        number = self.num_added
        self.num_added += 1
        prompt = [number, *range(PROMPT - 1)]  # its first block may be cached
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add(Request(request_id=f"r{number}", prompt_token_ids=prompt, sampling=params))

    def step(self) -> None:
        planned = self.scheduler.schedule()
        assert planned is not None
        sampled = [SequenceResult(s.slot, [1]) for s in planned.batch.sequences if s.samples]
        self.scheduler.update(planned, StepResult(planned.batch.step, sampled))


def measure(policy: str, running: int, queued: int, cached: int, steps: int, *, turnover: bool) -> float:
    """Median microseconds of a step."""
    bench = Bench(policy, running, queued, cached, running if turnover else None)
    gc.collect()
    seconds: list[float] = []
    for i in range(steps + 20):
        started = time.perf_counter()
        if turnover:
            bench.add(running)
        bench.step()
        if i >= 20:
            seconds.append(time.perf_counter() - started)
    return 1e6 * statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--running", type=int, default=32)
    parser.add_argument("--policies", default="fcfs,lpm")
    arguments = parser.parse_args()
    running, steps = arguments.running, arguments.steps
    print(f"{running} running; microseconds a step\n\n| policy | queued | cached | decode | turnover |")
    print("| --- | --- | --- | --- | --- |")
    for policy in arguments.policies.split(","):
        for queued, cached in [*((q, 0) for q in QUEUES), *((100, c) for c in CACHED)]:
            decode, turnover = (
                measure(policy, running, queued, cached, steps, turnover=kind) for kind in (False, True)
            )
            print(f"| {policy} | {queued} | {cached} | {decode:.0f} | {turnover:.0f} |", flush=True)


if __name__ == "__main__":
    main()
