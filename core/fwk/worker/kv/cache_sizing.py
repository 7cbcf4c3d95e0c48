"""The KV cache as large as the rest of a run allows: that is measured first, on a device of its own memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from fwk.config import Config
from fwk.errors import ConfigError
from fwk.features.worker import WorkerFeatures
from fwk.interfaces.attention import AttentionBackend, AttentionLayer
from fwk.interfaces.device import CacheMemory, MemoryInfo
from fwk.interfaces.parallel import ParallelGroup
from fwk.setup.resolve import ModelSetup
from fwk.worker.graphs.graph_sizes import GraphSizes
from fwk.worker.graphs.step_graphs import StepModel
from fwk.worker.kv import kv_cache
from fwk.worker.kv.memory_profile import MemoryProfile, MemoryUse
from fwk.worker.runner.model_runner import ModelRunner
from fwk.worker.runner.prompt_runner import PromptRunner
from fwk.worker.runner.rehearsal import LargestStep

log = logging.getLogger(__name__)

BindCapture = Callable[[int, int], None]
"""Tells inputs and attention of the number of blocks, and of the one that no sequence holds (``Capturing.prepare``)."""
TrialCaptures = Callable[[Sequence[int]], StepModel]
"""``Capturing.on_trial`` of a model."""


@dataclass(frozen=True, slots=True)
class SizedCache:
    """num_blocks: that sequences may hold. memory: bytes by what has them; empty on a device that is the host."""

    num_blocks: int
    tensors: CacheMemory | None
    memory: dict[str, int]


class CacheSizing:
    """Counts and allocates the KV cache of one worker, whose runner is built but for that."""

    def __init__(  # noqa: PLR0913 - what a worker has
        self,
        config: Config,
        setup: ModelSetup,
        attention: AttentionBackend,
        groups: list[list[AttentionLayer]],
        ranks: ParallelGroup,
        device: torch.device,
        memory: Callable[[], MemoryInfo],
        *,
        others: int,
        num_null: int,
        graph_sizes: Sequence[int],
        piece_sizes: Sequence[int] = (),
        kept_bytes: int = 0,
    ) -> None:
        """groups: layers by block table. others: bytes in use before anything was loaded. num_null: blocks that no
        sequence holds. graph_sizes: of decode steps that are captured, smallest first; piece_sizes: of steps in pieces.
        kept_bytes: what features may keep.
        """
        self._options = config.engine
        self._setup = setup
        self._attention = attention
        self._groups = groups
        self._ranks = ranks
        self._device = device
        self._memory = memory
        self._others = others
        self._num_null = num_null
        self._graph_sizes = graph_sizes
        self._piece_sizes = piece_sizes
        self._kept_bytes = kept_bytes

    def size(
        self,
        runner: ModelRunner | PromptRunner,
        largest: LargestStep,
        parts: WorkerFeatures | None = None,
        bind: BindCapture = lambda num_blocks, null_block: None,
        on_trial: TrialCaptures | None = None,
        pieces_on_trial: TrialCaptures | None = None,
    ) -> SizedCache:
        """Give every layer its K/V: what was asked for, or all that the largest step and the captures leave.

        Raises ``ConfigError`` where there is too little, with all the numbers.
        """
        device, use = self._setup.device, MemoryUse(others=self._others)
        if not device.is_host:
            most, every = self._most(use)
            seq_len = min(largest.seq_len, every // len(self._groups) * self._options.page_size)
            use = self._measured(
                runner, replace(largest, seq_len=seq_len), most, parts, bind, on_trial, pieces_on_trial
            )
        memory = self._memory()
        num_blocks = self._count(use)
        tensors = self._allocate(num_blocks + self._num_null)
        if device.is_host:
            return SizedCache(num_blocks, tensors, {})
        found = {
            "total": memory.total,
            "others": use.others,
            "weights": memory.total - memory.free - use.others,
            "step": use.step,
            "graphs": use.graphs,
            "kv_cache": kv_cache.bytes_of(tensors),
        }
        sizes = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in found.items())
        log.info("memory of the device in MiB: %s", sizes)
        return SizedCache(num_blocks, tensors, found)

    def _most(self, use: MemoryUse) -> tuple[int, int]:
        """Blocks there would be if steps took nothing, and in all the memory that is free.

        Where that are none, those of the smallest cache. By the second the longest sequence is known: what the largest
        step takes, and the value that an error says would do, are then the same under every limit.
        """
        options, memory = self._options, self._memory()
        least, size = len(self._groups), kv_cache.block_bytes(self._attention, self._groups[0])
        if options.max_total_tokens is not None or not size:
            limit = options.max_total_tokens or options.max_running_requests * self._setup.max_sequence_len
            wanted = least * -(-limit // options.page_size)
            return wanted, wanted
        left = self._limit(use, memory).most - (memory.total - memory.free)
        counts = (max(least, room // size - self._num_null) for room in (left, memory.free))
        most, every = (kv_cache.agree(count, self._ranks, self._device) for count in counts)
        return most, every

    def _limit(self, use: MemoryUse, memory: MemoryInfo) -> kv_cache.MemoryLimit:
        options = self._options
        defaults = self._setup.device.defaults(self._setup.opened.config.torch_dtype, options.max_running_requests)
        reserve = options.device_reserve_memory_bytes
        if reserve and self._setup.device.is_host:
            raise ConfigError(
                "--device-reserve-memory-bytes: this device has no memory but the host's, of which weights take what "
                "they need; --max-total-tokens or --mem-fraction-static sets the KV cache's size"
            )
        if reserve:
            return kv_cache.bytes_limit(reserve, use.others, memory.total)
        return kv_cache.fraction_limit(options.mem_fraction_static or defaults.memory_fraction, memory.total)

    def _count(self, use: MemoryUse) -> int:
        options, memory = self._options, self._memory()
        count = kv_cache.count_blocks(
            max_total_tokens=options.max_total_tokens,
            limit=self._limit(use, memory),
            block_size=options.page_size,
            bytes_per_block=kv_cache.block_bytes(self._attention, self._groups[0]),
            memory=memory,
            most=options.max_running_requests * -(-self._setup.max_sequence_len // options.page_size),
            num_tables=len(self._groups),
            num_null=self._num_null,
            use=use,
        )
        return kv_cache.agree(count, self._ranks, self._device)

    def _allocate(self, num_blocks: int) -> CacheMemory | None:
        return kv_cache.allocate(self._attention, self._groups, num_blocks, self._setup.device, self._device)

    def _measured(
        self,
        runner: ModelRunner | PromptRunner,
        largest: LargestStep,
        most: int,
        parts: WorkerFeatures | None,
        bind: BindCapture,
        on_trial: TrialCaptures | None,
        pieces_on_trial: TrialCaptures | None,
    ) -> MemoryUse:
        """What the largest step and the captures take, with a cache of one block. most: blocks there can be."""
        profile = MemoryProfile(self._setup.device, self._device, self._memory)
        cache = self._allocate(1)
        bind(most + self._num_null, 0)
        step = graphs = 0
        if self._setup.opened.served.encoder is not None:
            log.warning("the memory of the largest step was not measured: an encoder reads the prompts")
        else:
            parts = parts or WorkerFeatures()
            told = parts.rehearsal()
            found = profile.most(lambda: largest.rehearse(runner, told))
            parts.rehearsed()
            if found is None:
                log.warning("the memory of the largest step was not measured: the device counts none")
            step = found or 0
        step += self._kept_bytes
        if isinstance(runner, ModelRunner) and on_trial is not None:
            graphs = profile.of_graphs(self._graph_sizes, partial(_captured, runner, on_trial, runner.captures.decodes))
        if isinstance(runner, ModelRunner) and pieces_on_trial is not None:
            capture = partial(_captured, runner, pieces_on_trial, runner.captures.pieces)
            graphs += profile.of_graphs(self._piece_sizes, capture)
        del cache
        for layer in (layer for group in self._groups for layer in group):
            layer.kv_cache = None
        profile.trim()
        return MemoryUse(self._others, step, graphs)


def _captured(
    runner: ModelRunner,
    on_trial: TrialCaptures,
    capture: Callable[[], GraphSizes | None],
    sizes: Sequence[int],
) -> tuple[StepModel, GraphSizes | None]:
    """Captures of some sizes, which are never replayed. capture: the runner's, of whole steps or of pieces."""
    served, runner.model = runner.model, on_trial(sizes)
    try:
        with torch.inference_mode():
            return runner.model, capture()
    finally:
        runner.model = served
