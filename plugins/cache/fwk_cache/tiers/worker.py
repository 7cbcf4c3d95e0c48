"""The part in each worker: a store over its KV cache, saved to and settled around the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fwk.interfaces.feature import StepRunner, WorkerCache, WorkerPart, WorkerPartContext
from fwk.interfaces.prefix_cache import CacheTierContext, CacheTierSpec, PrefixCacheSpec
from fwk.types import Batch, StepResult
from fwk_cache.tiers import tiers_of
from fwk_cache.tiers.store import OPERATIONS, BlockStore


class Tiers(WorkerPart):
    """Opens the tiers of the run; without any it does nothing."""

    def __init__(self, context: WorkerPartContext) -> None:
        super().__init__(context)
        self._store: BlockStore | None = None
        cache = context.chosen["cache"]
        assert isinstance(cache, PrefixCacheSpec)
        self._names = tiers_of(cache, context.options)
        assert context.plugins is not None
        specs = [item.declaration for item in context.plugins.items("cache_tiers") if item.name in self._names]
        self._outlives = any(isinstance(spec, CacheTierSpec) and spec.outlives_process for spec in specs)
        if self._outlives:
            context.hash_files()

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        """What ``WorkerTransfer`` calls; there is a store by then."""
        return {name: partial(self._run, name) for name in OPERATIONS}

    def _run(self, name: str, *args: Any) -> Any:
        assert self._store is not None
        return getattr(self._store, name)(*args)

    def cache_allocated(self, cache: WorkerCache) -> None:
        """Open the tiers. Raises ``ConfigError`` when one cannot work."""
        if not self._names:
            return
        context, plugins = self.context, self.context.plugins
        assert plugins is not None
        caches = [layer.kv_cache for layer in cache.layers if layer.kv_cache is not None]
        made = partial(
            CacheTierContext,
            num_blocks=cache.num_blocks,
            block_bytes=sum(blocks[0].numel() * blocks.itemsize for blocks in caches),
            identity=cache.identity(self._outlives),
            device=context.device.type,
        )
        tiers = [(name, plugins.choose("cache_tiers", name, made)) for name in self._names]
        self._store = BlockStore(caches, tiers, context.is_host, context.send, context.host_buffer, context.event)

    def around(self, runner: StepRunner) -> StepRunner:
        return runner if self._store is None else SavingRunner(runner, self._store)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


class SavingRunner:
    """A runner around whose steps blocks are copied to the tiers, as ``Batch.saves`` asks."""

    def __init__(self, runner: StepRunner, store: BlockStore) -> None:
        self._runner = runner
        self._store = store
        self._num_saved: deque[int] = deque()  # when each step in flight was launched
        self.settle = runner.settle

    def launch(self, batch: Batch) -> Any:
        """As the runner does."""
        if batch.saves is not None:
            self._store.save(batch.saves.before)
        try:
            pending = self._runner.launch(batch)
        finally:
            self._num_saved.append(self._store.num_saved)
        if batch.saves is not None:
            self._store.save(batch.saves.after)
        return pending

    def collect(self, pending: Any) -> StepResult:
        """As the runner does."""
        result = self._runner.collect(pending)
        result.troubles = (*result.troubles, *self._store.troubles, *self._store.troubled_tiers())
        self._store.settle(self._num_saved.popleft())  # these arrived before the step's tokens
        return result
