"""K/V through files in a folder that both sides see."""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch

from fwk.interfaces.kv_transfer import KVTransfer, KVTransferContext, Transfer


class MineTransfer(KVTransfer):
    """An offer is a file in the folder of its side: all layers of a block, then the next block. Reading it removes it.

    The secret is not asked for: who sees the folder may read it.
    """

    def __init__(self, context: KVTransferContext) -> None:
        super().__init__(context)
        parent = context.options.mine_folder or tempfile.gettempdir()
        self._folder = Path(parent) / f"fwk-mine-{uuid.uuid4().hex}"
        self._folder.mkdir(parents=True)
        self._ended: list[Transfer] = []
        self._offers: dict[str, float] = {}
        self._wanted: dict[str, tuple[Path, Sequence[int], Sequence[int], float]] = {}
        self._block_bytes = sum(cache[0].nbytes for cache in context.kv_caches)

    def address(self) -> bytes:
        return os.fsencode(self._folder)

    def offer(self, key: str, block_ids: Sequence[int], deadline: float) -> None:
        rows = [cache[list(block_ids)].view(len(block_ids), -1).view(torch.uint8) for cache in self.context.kv_caches]
        part = self._folder / f"{key}.part"
        part.write_bytes(self.context.identity + torch.cat(rows, 1).numpy().tobytes())
        part.rename(self._folder / f"{key}.whole")  # seen by the other side only when it is whole
        self._offers[key] = deadline

    def withdraw(self, key: str) -> None:
        if self._offers.pop(key, None) is not None:
            (self._folder / f"{key}.whole").unlink(missing_ok=True)
            self._ended.append(Transfer(key, False, error="it was withdrawn"))

    def receive(self, peer: bytes, key: str, places: Sequence[int], block_ids: Sequence[int], deadline: float) -> None:
        self._wanted[key] = Path(os.fsdecode(peer)) / f"{key}.whole", places, block_ids, deadline

    def cancel(self, key: str) -> None:
        if self._wanted.pop(key, None) is not None:
            self._ended.append(Transfer(key, False, error="it was cancelled"))

    def poll(self) -> list[Transfer]:
        now = time.monotonic()
        for key, deadline in list(self._offers.items()):
            path = self._folder / f"{key}.whole"
            if not path.exists():
                self._ended.append(Transfer(key, True))
                del self._offers[key]
            elif now > deadline:
                self.withdraw(key)
        for key, (path, places, block_ids, deadline) in list(self._wanted.items()):
            if now > deadline:
                self.cancel(key)
            elif path.exists():
                self._ended.append(self._take(key, path.read_bytes(), places, block_ids))
                path.unlink(missing_ok=True)
                del self._wanted[key]
        ended, self._ended = self._ended, []
        return ended

    def _take(self, key: str, data: bytes, places: Sequence[int], block_ids: Sequence[int]) -> Transfer:
        identity = self.context.identity
        if not data.startswith(identity):
            return Transfer(key, False, error="it is the K/V of another model")
        size = self._block_bytes
        blocks = torch.frombuffer(bytearray(data[len(identity) :]), dtype=torch.uint8).view(-1, size)
        if any(place >= len(blocks) for place in places):
            return Transfer(key, False, error="the offer has fewer blocks")
        rows, start = blocks[list(places)], 0
        for cache in self.context.kv_caches:
            bytes_of_layer = cache[0].nbytes
            part = rows[:, start : start + bytes_of_layer].contiguous().view(cache.dtype)
            cache[list(block_ids)] = part.view(-1, *cache.shape[1:])
            start += bytes_of_layer
        return Transfer(key, True, len(places) * size)

    def close(self) -> None:
        for path in self._folder.glob("*"):
            path.unlink()
        self._folder.rmdir()
