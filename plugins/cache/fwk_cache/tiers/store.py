"""Blocks of the KV cache to bytes and back."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fwk.errors import PluginFault
from fwk.interfaces.device import Event, NoEvent, Upload
from fwk.interfaces.prefix_cache import CacheTier
from fwk_cache.tiers.prefetching import Prefetcher

log = logging.getLogger(__name__)

STAGING_BYTES = 32 * 2**20
MAX_AT_ONCE = 256
"""Blocks are moved in groups of about this size, or this number if that is less; one at least."""

OPERATIONS = ("find_blocks", "load_blocks", "can_prefetch", "prefetch_blocks", "prefetched_blocks", "end_prefetch")
"""Methods of a store that the engine calls."""


@dataclass(frozen=True, slots=True)
class _Buffer:
    """The host's memory for a group of blocks, and the end of what was last copied to or from it."""

    tensor: Tensor  # [group, block_bytes] uint8
    rows: list[memoryview]
    event: Event


@dataclass(frozen=True, slots=True)
class _Saving:
    """A group on its way to the host, and which tiers lack each of its blocks."""

    buffer: _Buffer
    entries: list[tuple[bytes, list[tuple[str, CacheTier]]]]


class BlockStore:
    """Copies blocks between the KV cache and the tiers, fastest first.

    An entry is the bytes of one block in every layer, one layer after another: what they mean is the attention
    backend's business. A tier that raises has not got the entry; the first time is logged. A device's blocks are on
    their way when ``save`` returns, and tiers get them in ``settle``.
    """

    def __init__(
        self,
        caches: Sequence[Tensor],
        tiers: Sequence[tuple[str, CacheTier]],
        is_host: bool = True,
        send: Upload = torch.from_numpy,
        host_buffer: Callable[..., Tensor] | None = None,
        event: Callable[[], Event] = NoEvent,
    ) -> None:
        """caches: each layer's [num_blocks, *block_shape]; tiers: with their names, for the log; is_host, send,
        host_buffer, event: of the device that has the blocks, as in ``WorkerPartContext``.
        """
        self._caches = [cache.view(cache.shape[0], -1).view(torch.uint8) for cache in caches]
        self._tiers = list(tiers)
        self._failed: set[str] = set()
        self.troubles: list[str] = []
        """Of tiers that failed, for ``StepResult.troubles``."""
        block_bytes = sum(cache.shape[1] for cache in self._caches)
        self._group = min(max(1, STAGING_BYTES // block_bytes), MAX_AT_ONCE)
        self._is_host = is_host
        self._send, self._host_buffer, self._event = send, host_buffer or torch.zeros, event
        self._block_bytes = block_bytes
        self._free: list[_Buffer] = []
        self._saving: deque[_Saving] = deque()
        self._num_saved = 0
        readers = [(name, reader) for name, tier in self._tiers[1:] if (reader := tier.reader()) is not None]
        self._prefetcher: Prefetcher | None = None
        far = set[str]()
        if readers and self._tiers[0][1].num_entries != 0 and self._tiers[0][1].reader() is None:
            self._prefetcher = Prefetcher(readers, block_bytes, self._tiers[0][1].num_entries)
            far = {name for name, _ in readers}
        self._near = [tier for tier in self._tiers if tier[0] not in far]

    @torch.inference_mode()
    def save(self, pairs: Sequence[tuple[bytes, int]]) -> None:
        """Give every tier what it has not got."""
        coming = {key for saving in self._saving for key, _ in saving.entries}
        lacking = [(key, block, self._lacking(key)) for key, block in pairs if key not in coming]
        lacking = [entry for entry in lacking if entry[2]]
        for start in range(0, len(lacking), self._group):
            group = lacking[start : start + self._group]
            ids = self._send(np.array([block for _, block, _ in group], np.int64))
            buffer = self._take_buffer()
            blocks = torch.cat([cache.index_select(0, ids) for cache in self._caches], 1)
            buffer.tensor[: len(group)].copy_(blocks, non_blocking=True)
            buffer.event.record()
            self._saving.append(_Saving(buffer, [(key, tiers) for key, _, tiers in group]))
            self._num_saved += 1
        if self._is_host:
            self.settle()

    @property
    def num_saved(self) -> int:
        """Copies that ``save`` has begun, ever."""
        return self._num_saved

    def settle(self, until: int | None = None) -> None:
        """Give tiers what ``save`` has begun to copy from the device: the first ``until`` copies of all, or every one.

        Waits where these have not arrived.
        """
        while self._saving and (until is None or self._num_saved - len(self._saving) < until):
            saving = self._saving.popleft()
            saving.buffer.event.wait()
            for row, (key, tiers) in zip(saving.buffer.rows, saving.entries, strict=False):
                for tier in tiers:
                    self._put(tier, key, row)
            self._free.append(saving.buffer)

    def _take_buffer(self) -> _Buffer:
        if self._free:
            return self._free.pop()
        tensor = self._host_buffer((self._group, self._block_bytes), dtype=torch.uint8)
        return _Buffer(tensor, [row.numpy().data for row in tensor], self._event())

    def _lacking(self, key: bytes) -> list[tuple[str, CacheTier]]:
        return [tier for tier in self._tiers if not self._contains(tier, key)]

    def can_prefetch(self) -> bool:
        """Whether there is a fast tier to read ahead into, and another to read from."""
        return self._prefetcher is not None

    def find_blocks(self, pairs: Sequence[tuple[bytes, int]], keys: Sequence[bytes], is_near: bool = False) -> int:
        """``save`` what the engine still owes, then ``find``: one call of the engine."""
        self.save(pairs)
        self.settle()
        return self.find(keys, is_near)

    def load_blocks(
        self, pairs: Sequence[tuple[bytes, int]], keys: Sequence[bytes], block_ids: Sequence[int], is_near: bool = False
    ) -> int:
        """``save`` what the engine still owes, then ``load``: one call of the engine."""
        self.save(pairs)
        self.settle()
        return self.load(keys, block_ids, is_near)

    def find(self, keys: Sequence[bytes], is_near: bool = False) -> int:
        """How many keys, from the first on, some tier probably has; ``is_near``: one that is not read ahead.

        They count as used, the first one last: of a path, tiers forget the end before what is above it.
        """
        self.prefetched_blocks()
        tiers = self._near if is_near else self._tiers
        count = next((i for i, key in enumerate(keys) if not self._is_anywhere(key, tiers)), len(keys))
        for key in reversed(keys[:count]):
            self._is_anywhere(key, tiers)
        return count

    def prefetch_blocks(self, number: int, keys: Sequence[bytes]) -> bool:
        """Begin to read what the near tiers lack of a path; False when they lack nothing."""
        lacking = [key for key in keys if not self._is_anywhere(key, self._near)]
        if self._prefetcher is None or not lacking:
            return False
        self._prefetcher.start(number, lacking, len(keys) - len(lacking))
        return True

    def prefetched_blocks(self, numbers: Sequence[int] = ()) -> list[bool]:
        """Keep what has been read ahead; of each ``prefetch_blocks``, whether it has ended."""
        if self._prefetcher is None:
            return [True] * len(numbers)
        return self._prefetcher.take(lambda key, entry: self._put(self._tiers[0], key, entry), numbers)

    def end_prefetch(self, number: int) -> None:
        """Keep what has been read of it, and read no more."""
        if self._prefetcher is not None:
            self._prefetcher.end(number)
            self.prefetched_blocks()

    @torch.inference_mode()
    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], is_near: bool = False) -> int:
        """Fill blocks from the first tier that has each; returns how many, from the first on, were filled."""
        tiers = self._near if is_near else self._tiers
        for start in range(0, len(keys), self._group):
            group = keys[start : start + self._group]
            buffer = self._take_buffer()
            buffer.event.wait()
            found = next((i for i, key in enumerate(group) if not self._get(key, buffer.rows[i], tiers)), len(group))
            ids = self._send(np.array(block_ids[start : start + found], np.int64))
            blocks = buffer.tensor[:found].to(self._caches[0].device, non_blocking=True)
            buffer.event.record()
            for cache, part in zip(self._caches, blocks.split([x.shape[1] for x in self._caches], 1), strict=True):
                cache.index_copy_(0, ids, part)
            self._free.insert(0, buffer)  # to be taken last
            if found < len(group):
                return start + found
        return len(keys)

    def close(self) -> None:
        """Close the tiers, once they have what was on its way."""
        self.settle()
        if self._prefetcher is not None:
            self._prefetcher.close()
        for name, tier in self._tiers:
            try:
                tier.close()
            except Exception as error:
                self._complain(name, error)

    def _is_anywhere(self, key: bytes, tiers: Sequence[tuple[str, CacheTier]]) -> bool:
        return any([self._contains(tier, key) for tier in tiers])  # a list: each tier is to count it as used

    def _contains(self, tier: tuple[str, CacheTier], key: bytes) -> bool:
        try:
            return tier[1].contains(key)
        except Exception as error:
            self._complain(tier[0], error)
            return False

    def _get(self, key: bytes, row: memoryview, tiers: Sequence[tuple[str, CacheTier]]) -> bool:
        """Read an entry from the first tier that has it, and keep it in the faster ones."""
        for i, (name, tier) in enumerate(tiers):
            try:
                found = tier.get(key, row)
            except Exception as error:
                self._complain(name, error)
                continue
            if found:
                for faster in tiers[:i]:
                    self._put(faster, key, row)
                return True
        return False

    def _put(self, tier: tuple[str, CacheTier], key: bytes, row: memoryview) -> None:
        try:
            tier[1].put(key, row)
        except Exception as error:
            self._complain(tier[0], error)

    def troubled_tiers(self) -> list[str]:
        """What tiers say of themselves now, for ``StepResult.troubles``."""
        return [f"cache tier {name}: {trouble}" for name, tier in self._tiers if (trouble := tier.trouble) is not None]

    def _complain(self, name: str, error: Exception) -> None:
        if name not in self._failed:
            self._failed.add(name)
            log.warning("cache tier %s failed, serving continues without what it lacks: %r", name, error)
            if isinstance(error, PluginFault):
                self.troubles.append(f"{error}; serving continues without what it lacks")
