"""Moving K/V between servers, worker to worker: one computes prompts, another reads their blocks and decodes."""

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
    """What a transport is built with, once in each worker.

    kv_caches: what both sides have of every layer, [num_blocks, ...], on the host: its cache, or views of the K/V heads
    that both have, whose rows (all but the first dimension) are contiguous. identity: 32 bytes that differ whenever
    the bytes of a block would mean something else. secret: what both sides must prove that they know. rank: a number
    from 0 that no other transport of the server has, first those of the workers; ports may be counted by it.

    - ``block_size``: tokens in a block.
    - ``options``: the plugin's own options, validated; None where it declares none.
    """

    kv_caches: Sequence[Tensor]
    block_size: int
    options: Any = None
    identity: bytes = b""
    secret: bytes = b""
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Transfer:
    """The end of an offer, or of what was received.

    is_whole: every wanted block has arrived undamaged. num_bytes: of K/V that went over the wire. error: why it is not
    whole, for the log.

    - ``key``: as it was offered or received.
    - ``seconds``: that reading took; 0 where none was begun.
    """

    key: str
    is_whole: bool
    num_bytes: int = 0
    seconds: float = 0.0
    error: str = ""


class KVTransfer(ABC):
    """A transport between two workers' KV caches. The side that wants blocks reads them (pull).

    Nothing here waits for the network: transfers go on in the background, and ``poll`` tells of their ends. Each has a
    deadline (``time.monotonic``), at which it ends however far it is. What is damaged, late or of another identity is
    not whole; the receiver computes it.
    """

    def __init__(self, context: KVTransferContext) -> None:
        self.context = context

    @abstractmethod
    def address(self) -> bytes:
        """What the other side needs to reach this one."""

    @abstractmethod
    def offer(self, key: str, block_ids: Sequence[int], deadline: float) -> None:
        """Let blocks be read under a key that no other offer has, once. They do not change until the offer has ended.

        ``poll`` names it when the blocks were read, when reading them has failed, or at the deadline; nothing reads
        them any more then.
        """

    @abstractmethod
    def withdraw(self, key: str) -> None:
        """End an offer as soon as nothing reads it; ``poll`` names it. Unknown keys are ignored."""

    @abstractmethod
    def receive(self, peer: bytes, key: str, places: Sequence[int], block_ids: Sequence[int], deadline: float) -> None:
        """Read ``places`` of what ``peer`` offers under a key into blocks that nothing else reads or writes.

        The content of the blocks is undefined until ``poll`` names the key; nothing writes to them any more then. With
        no places, this tells the other side that its offer is not wanted.
        """

    @abstractmethod
    def cancel(self, key: str) -> None:
        """Receive no more under a key; ``poll`` names it soon, unless it has. Unknown keys are ignored."""

    @abstractmethod
    def poll(self) -> list[Transfer]:
        """Offers and receptions that ended since the last call, each once."""

    @abstractmethod
    def close(self) -> None:
        """Give up what is under way, within a second."""


@dataclass(frozen=True, kw_only=True)
class KVTransferSpec(Declaration):
    """Declares a KV transport (``--disaggregation-transfer-backend``)."""

    family: ClassVar[str] = "kv_transfer"
