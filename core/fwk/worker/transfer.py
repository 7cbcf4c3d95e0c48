"""The worker's side of cache tiers: blocks of the KV cache to bytes and back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fwk.config import Config
from fwk.interfaces.attention import AttentionLayer
from fwk.interfaces.parallel import ParallelGroup
from fwk.interfaces.prefix_cache import CacheTier, CacheTierContext
from fwk.plugins.selection import choose_tiers
from fwk.setup.resolve import ModelSetup
from fwk.worker.identity import kv_identity

log = logging.getLogger(__name__)

STAGING_BYTES = 32 * 2**20
MAX_AT_ONCE = 256
"""Blocks are moved in groups of about this size, or this number if that is less; one at least."""


class BlockStore:
    """Copies blocks between the KV cache and the tiers, fastest first.

    An entry is the bytes of one block in every layer, one layer after another: what they mean is the attention
    backend's business. A tier that raises has not got the entry; the first time is logged.
    """

    def __init__(
        self,
        caches: Sequence[Tensor],
        tiers: Sequence[tuple[str, CacheTier]],
        host_buffer: Callable[..., Tensor] = torch.zeros,
    ) -> None:
        """caches: each layer's [num_blocks, *block_shape]; tiers: with their names, for the log;
        host_buffer: the device's."""
        self._caches = [cache.view(cache.shape[0], -1).view(torch.uint8) for cache in caches]
        self._tiers = list(tiers)
        self._failed: set[str] = set()
        block_bytes = sum(cache.shape[1] for cache in self._caches)
        self._group = min(max(1, STAGING_BYTES // block_bytes), MAX_AT_ONCE)
        self._staging = host_buffer((self._group, block_bytes), dtype=torch.uint8)
        self._rows = [row.numpy().data for row in self._staging]

    @torch.inference_mode()
    def save(self, pairs: Sequence[tuple[bytes, int]]) -> None:
        """Give every tier what it has not got."""
        lacking = [(key, block, [t for t in self._tiers if not self._contains(t, key)]) for key, block in pairs]
        lacking = [entry for entry in lacking if entry[2]]
        for start in range(0, len(lacking), self._group):
            group = lacking[start : start + self._group]
            ids = torch.tensor([block for _, block, _ in group], device=self._caches[0].device)
            self._staging[: len(group)].copy_(torch.cat([cache.index_select(0, ids) for cache in self._caches], 1))
            for row, (key, _, tiers) in zip(self._rows, group, strict=False):
                for tier in tiers:
                    self._put(tier, key, row)

    def save_and_find(self, pairs: Sequence[tuple[bytes, int]], keys: Sequence[bytes]) -> int:
        """``save`` what the engine still owes, then ``find``: one call of the engine."""
        self.save(pairs)
        return self.find(keys)

    def save_and_load(self, pairs: Sequence[tuple[bytes, int]], keys: Sequence[bytes], block_ids: Sequence[int]) -> int:
        """``save`` what the engine still owes, then ``load``: one call of the engine."""
        self.save(pairs)
        return self.load(keys, block_ids)

    def find(self, keys: Sequence[bytes]) -> int:
        """How many keys, from the first on, some tier probably has.

        They count as used, the first one last: of a path, tiers forget the end before what is above it.
        """
        count = next((i for i, key in enumerate(keys) if not self._is_anywhere(key)), len(keys))
        for key in reversed(keys[:count]):
            self._is_anywhere(key)
        return count

    @torch.inference_mode()
    def load(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> int:
        """Fill blocks from the first tier that has each; returns how many, from the first on, were filled."""
        for start in range(0, len(keys), self._group):
            group = keys[start : start + self._group]
            found = next((i for i, key in enumerate(group) if not self._get(key, self._rows[i])), len(group))
            device = self._caches[0].device
            ids = torch.tensor(block_ids[start : start + found], dtype=torch.int64, device=device)
            parts = self._staging[:found].to(device).split([cache.shape[1] for cache in self._caches], 1)
            for cache, part in zip(self._caches, parts, strict=True):
                cache.index_copy_(0, ids, part)
            if found < len(group):
                return start + found
        return len(keys)

    def close(self) -> None:
        """Close the tiers."""
        for name, tier in self._tiers:
            try:
                tier.close()
            except Exception as error:
                self._complain(name, error)

    def _is_anywhere(self, key: bytes) -> bool:
        return any([self._contains(tier, key) for tier in self._tiers])  # a list: each tier is to count it as used

    def _contains(self, tier: tuple[str, CacheTier], key: bytes) -> bool:
        try:
            return tier[1].contains(key)
        except Exception as error:
            self._complain(tier[0], error)
            return False

    def _get(self, key: bytes, row: memoryview) -> bool:
        """Read an entry from the first tier that has it, and keep it in the faster ones."""
        for i, (name, tier) in enumerate(self._tiers):
            try:
                found = tier.get(key, row)
            except Exception as error:
                self._complain(name, error)
                continue
            if found:
                for faster in self._tiers[:i]:
                    self._put(faster, key, row)
                return True
        return False

    def _put(self, tier: tuple[str, CacheTier], key: bytes, row: memoryview) -> None:
        try:
            tier[1].put(key, row)
        except Exception as error:
            self._complain(tier[0], error)

    def _complain(self, name: str, error: Exception) -> None:
        if name not in self._failed:
            self._failed.add(name)
            log.warning("cache tier %s failed, serving continues without what it lacks: %r", name, error)


def open_store(
    config: Config,
    setup: ModelSetup,
    chosen: dict[str, str],
    layers: list[AttentionLayer],
    tp: ParallelGroup,
    *,
    num_blocks: int,
) -> BlockStore | None:
    """The tiers of a worker whose KV cache is allocated, when the prefix cache of the run uses any; names them in
    ``chosen``. Raises ``ConfigError`` when one cannot work.
    """
    factory = setup.factory
    items = choose_tiers(factory.plugins, factory.item("cache"), config.engine.cache_tiers, setup.facts)
    if not items:
        return None
    caches = [layer.kv_cache for layer in layers if layer.kv_cache is not None]
    context = partial(
        CacheTierContext,
        num_blocks=num_blocks,
        block_bytes=sum(cache[0].numel() * cache.itemsize for cache in caches),
        identity=kv_identity(config, factory.plugins, setup, chosen, layers, tp),
        device=setup.facts.host.device,
    )
    chosen["cache_tiers"] = ", ".join(item.name for item in items)
    return BlockStore(caches, [(item.name, factory.build(item, context)) for item in items], setup.device.host_buffer)
