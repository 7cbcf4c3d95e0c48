"""Cache tiers for the engine without a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fwk.interfaces.prefix_cache import BlockTransfer, CacheTier, CacheTierContext
from fwk_cache.tiers.store import BlockStore
from fwk_cache.tiers.transfer import WorkerTransfer


class Tiered:
    """``make_engine(tiers=)``: what ``make`` makes, in the order of their speed."""

    def __init__(self, make: Callable[[CacheTierContext], list[CacheTier]]) -> None:
        self._make = make

    def store(self, blocks: torch.Tensor) -> BlockStore:
        context = CacheTierContext(len(blocks), blocks[0].nbytes, bytes(32))
        return BlockStore([blocks], [(str(i), tier) for i, tier in enumerate(self._make(context))])

    def transfer(self, call: Callable[..., list[Any]]) -> BlockTransfer:
        return WorkerTransfer(call)
