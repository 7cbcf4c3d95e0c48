"""K/V through files in a folder that both sides see."""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch

from fwk.interfaces.kv_transfer import KVTransfer, KVTransferContext


class MineTransfer(KVTransfer):
    """A message is a file in the receiver's folder: all layers' blocks, one after the other."""

    def __init__(self, context: KVTransferContext) -> None:
        super().__init__(context)
        parent = context.options.mine_folder or tempfile.gettempdir()
        self._folder = Path(parent) / f"fwk-mine-{uuid.uuid4().hex}"
        self._folder.mkdir(parents=True)
        self._ended: list[tuple[str, bool]] = []
        self._waiting: dict[str, tuple[Sequence[int], float]] = {}

    def address(self) -> bytes:
        return os.fsencode(self._folder)

    def send(self, peer: bytes, key: str, block_ids: Sequence[int], deadline: float) -> None:
        folder = Path(os.fsdecode(peer))
        data = b"".join(cache[list(block_ids)].view(torch.uint8).numpy().tobytes() for cache in self.context.kv_caches)
        (folder / f"{key}.part").write_bytes(data)
        (folder / f"{key}.part").rename(folder / f"{key}.whole")  # seen by the other side only when it is whole
        self._ended.append((key, True))

    def receive(self, peer: bytes, key: str, block_ids: Sequence[int], deadline: float) -> None:
        self._waiting[key] = block_ids, deadline

    def poll(self) -> list[tuple[str, bool]]:
        for key, (block_ids, deadline) in list(self._waiting.items()):
            path = self._folder / f"{key}.whole"
            if path.exists():
                self._take(path.read_bytes(), block_ids)
                path.unlink()
                self._ended.append((key, True))
                del self._waiting[key]
            elif time.monotonic() > deadline:
                self._ended.append((key, False))
                del self._waiting[key]
        ended, self._ended = self._ended, []
        return ended

    def _take(self, data: bytes, block_ids: Sequence[int]) -> None:
        numbers, start = torch.frombuffer(bytearray(data), dtype=torch.uint8), 0
        for cache in self.context.kv_caches:
            target = cache[list(block_ids)]
            size = target.nbytes
            cache[list(block_ids)] = numbers[start : start + size].view(cache.dtype).view(target.shape)
            start += size

    def close(self) -> None:
        for path in self._folder.glob("*"):
            path.unlink()
        self._folder.rmdir()
