"""The engine: one scheduler, one executor, one loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fwk.config import Config
from fwk.engine.checked_cache import CheckedCache
from fwk.engine.gate import CacheGate
from fwk.engine.kv_block_manager import KVBlockManager
from fwk.engine.node import common
from fwk.engine.plan import Limits, PlannedStep
from fwk.engine.scheduler import Scheduler
from fwk.errors import InvalidRequest, ModelLoadError, RequestFailed
from fwk.features.declared import states_kept, step_planning
from fwk.features.engine import block_transfer, build_engine_features
from fwk.interfaces.executor import Executor, ExecutorContext, Worker, WorkerInfo
from fwk.interfaces.parallel import ParallelGroup
from fwk.interfaces.prefix_cache import CacheContext, PrefixCache
from fwk.interfaces.schedule import ScheduleContext, SchedulePolicy
from fwk.plugins import PluginSet
from fwk.plugins.selection import check_strict, check_used
from fwk.setup.resolve import ModelSetup
from fwk.types import EngineStats, Request, TokenEvent
from fwk.worker.remote import worker_recipe
from fwk.worker.worker import LocalWorker

ENGINE_STRIDE = 0xA0761D6478BD642F
"""Between the seeds of a server's engines: requests without a seed of their own must differ from engine to engine."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What callers must know of a loaded engine."""

    num_blocks: int
    num_block_tables: int
    block_size: int
    max_model_len: int
    vocab_size: int
    chosen: dict[str, str]
    reasons: list[str]
    refused: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    memory: dict[str, int] = field(default_factory=dict[str, int])
    """``WorkerInfo.memory`` of the first rank."""
    weights_identity: str = ""
    """``Checkpoint.weights_identity`` of what every rank has read."""


class Engine:
    """Requests in, token events out, one step at a time. Not thread-safe: one loop owns it."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        info: EngineInfo,
        *,
        is_overlapped: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.info = info
        self._depth = executor.depth if is_overlapped else 1
        self._in_flight: deque[tuple[PlannedStep, Any]] = deque()

    def step(self) -> list[TokenEvent]:
        """Plan and launch a step; take in the result of the oldest one in flight."""
        step = self.scheduler.schedule()
        if step is not None:
            self._in_flight.append((step, self.executor.launch(step.batch)))
        if not self._in_flight or (step is not None and len(self._in_flight) < self._depth):
            return []
        step, pending = self._in_flight.popleft()
        result = self.executor.collect(pending)
        return self.scheduler.lose(result.failure) if result.failure else self.scheduler.update(step, result)

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""
        return self.scheduler.has_work or bool(self._in_flight)

    def add(self, request: Request) -> list[TokenEvent]:
        """Queue a request; a request that can never be served is answered at once, with an error event each."""
        try:
            self.scheduler.add(request)
        except (InvalidRequest, RequestFailed) as error:
            why, is_refusal = str(error), isinstance(error, InvalidRequest)
            return [
                TokenEvent(request.request_id, i, [], "error", error=why, is_refusal=is_refusal)
                for i in range(request.n)
            ]
        return []

    def abort(self, request_id: str, index: int | None = None) -> list[TokenEvent]:
        """End a request, or one of its sequences."""
        return self.scheduler.abort(request_id, index)

    def call_workers(self, name: str, arguments: Sequence[Any]) -> list[Any]:
        """Run an operation on every worker; the answers by rank. Raises ``FwkError`` when one refuses."""
        return self.executor.call(name, *arguments)

    def call_feature(self, name: str, operation: str, arguments: Sequence[Any]) -> Any:
        """Run an operation of a feature's engine part, or else of its worker parts. Raises ``FwkError``: a refusal."""
        return self.scheduler.parts.call(name, operation, arguments)

    def check(self) -> None:
        """Raise ``EngineDead`` when the workers are gone: without a step it would go unnoticed."""
        self.executor.check()

    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def close(self) -> None:
        """Stop the workers."""
        self.scheduler.close()
        self.executor.close()


def build_engine(config: Config, plugins: PluginSet, setup: ModelSetup, engine_index: int = 0) -> Engine:
    """Choose the engine's plugins, load the model, and put the parts together.

    ``engine_index``: which of the server's engines it is.
    """
    options = config.engine

    def make_worker(group: ParallelGroup) -> Worker:
        return LocalWorker(config, setup, group, engine_index)

    check_strict(config.plugins.strict, setup.reasons)
    executor: Executor = setup.factory.build(
        "executors",
        ExecutorContext,
        make_worker=make_worker,
        recipe=worker_recipe(config, plugins, engine_index),
        tp_size=options.tensor_parallel_size,
        pp_size=options.pipeline_parallel_size,
        step_timeout=config.server.watchdog_timeout,
        common=partial(common, config, plugins, setup),
    )
    try:
        loaded = executor.load()
        check_used(plugins, config.plugin_options, loaded.chosen)
        check_strict(config.plugins.strict, loaded.reasons)
        _check_same_weights(setup, executor)
        return _assemble(config, plugins, setup, executor, loaded, engine_index)
    except BaseException:
        executor.close()
        raise


def _check_same_weights(setup: ModelSetup, executor: Executor) -> None:
    """Raise ``ModelLoadError`` unless all ranks have read the weights that this process has opened."""
    wanted = setup.opened.checkpoint.weights_identity()
    if wanted and any(found != wanted for found in executor.call("weights_identity")):
        raise ModelLoadError(f"the weights of {setup.opened.name} changed while the ranks read them: start again")


def _assemble(
    config: Config,
    plugins: PluginSet,
    setup: ModelSetup,
    executor: Executor,
    loaded: WorkerInfo,
    engine_index: int,
) -> Engine:
    options = config.engine
    transfer = block_transfer(setup.factory, executor.call)
    built: PrefixCache = setup.factory.build("cache", CacheContext, block_size=options.page_size, transfer=transfer)
    name = setup.factory.item("cache").label
    cache = CheckedCache(
        built, options.page_size, name, lambda: scheduler.shared_blocks, lambda why: scheduler.parts.trouble(why)
    )
    policy: SchedulePolicy = setup.factory.build("schedulers", ScheduleContext)
    planning = step_planning(setup.factory)
    limits = Limits(
        max_model_len=setup.max_sequence_len,
        max_step_tokens=setup.max_step_tokens,
        max_start_tokens=setup.max_start_tokens,
        max_decode_gap=setup.max_decode_gap,
        pace=planning.pace,
        max_prompts=planning.max_prompts,
        max_chunk_tokens=options.chunked_prefill_size if options.chunked_prefill_size > 0 else None,
        max_running=loaded.max_running or options.max_running_requests,
        block_size=options.page_size,
        eos_token_ids=frozenset(setup.eos_token_ids),
        seed=(config.seed if options.random_seed is None else options.random_seed) + engine_index * ENGINE_STRIDE,
        num_lookahead=loaded.num_lookahead,
        check_blocks=options.check_blocks,
        generates=setup.opened.runner == "generate",
        whole_prompts=setup.opened.served.needs_whole_prompts,
        conservativeness=planning.conservativeness,
        is_mixed=planning.is_mixed,
        admission_interval=planning.admission_interval,
        num_window_groups=loaded.num_window_groups,
        num_state_places=loaded.num_state_places,
        state_interval=states_kept(setup.factory).interval,
        window=loaded.window,
        encoder=setup.opened.served.encoder,
        runs_ahead=executor.launches_ahead and not options.disable_overlap_schedule,
        num_stages=options.pipeline_parallel_size,
        max_micro_batch=options.pp_max_micro_batch_size,
    )
    kv_blocks = KVBlockManager(limits, loaded.num_blocks, cache)
    scheduler = Scheduler(
        limits,
        kv_blocks,
        policy,
        gates=(CacheGate(cache),),
        policy_name=setup.factory.item("schedulers").label,
        parts=build_engine_features(
            setup.factory,
            executor.call,
            block_size=options.page_size,
            max_running=options.max_running_requests,
            is_host=setup.device.is_host,
            blocks=kv_blocks.reservations,
            num_running=lambda: scheduler.num_running,
            use_policy=lambda policy, name: scheduler.switch_policy(policy, name),
        ),
    )
    chosen = {**setup.resolution.chosen, **loaded.chosen}
    reasons = [*setup.reasons, *loaded.reasons]
    info = EngineInfo(
        num_blocks=loaded.num_blocks,
        num_block_tables=1 + loaded.num_window_groups,
        block_size=options.page_size,
        max_model_len=scheduler.max_sequence_tokens,
        vocab_size=loaded.vocab_size,
        chosen=chosen,
        memory=loaded.memory,
        weights_identity=setup.opened.checkpoint.weights_identity(),
        reasons=reasons,
        refused={family: dict(named) for family, named in setup.refused.items() if named},
    )
    return Engine(scheduler, executor, info, is_overlapped=not options.disable_overlap_schedule)
