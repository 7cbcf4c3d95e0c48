"""Moving K/V between engines (prefill/decode disaggregation)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fwk.interfaces.declaration import Declaration

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVTransferContext:
    """What a transport is built with: every layer's cache, [num_blocks, *block_shape]."""

    kv_caches: Sequence[Tensor]
    block_size: int
    options: Any = None


class KVTransfer(ABC):
    """A transport between two workers' KV caches. Every transfer has a deadline; a late one is recomputed."""

    def __init__(self, context: KVTransferContext) -> None:
        self.context = context

    @abstractmethod
    def address(self) -> bytes:
        """What the other side needs to reach this one."""

    @abstractmethod
    def send(self, peer: bytes, key: str, block_ids: Sequence[int], deadline: float) -> None:
        """Start sending blocks; they may be freed once ``poll`` names ``key``."""

    @abstractmethod
    def receive(self, peer: bytes, key: str, block_ids: Sequence[int], deadline: float) -> None:
        """Start receiving into blocks nobody else reads yet."""

    @abstractmethod
    def poll(self) -> list[tuple[str, bool]]:
        """Transfers that ended since the last call, and whether they arrived whole."""

    @abstractmethod
    def close(self) -> None:
        """Give up what is under way, within a second."""


@dataclass(frozen=True, kw_only=True)
class KVTransferSpec(Declaration):
    """Declares a KV transport (``--disaggregation-transfer-backend``)."""

    family: ClassVar[str] = "kv_transfer"
