"""K/V that outlives its sequences here, or comes before they start: the engine's side of transfers between servers.

A server that computes prompts keeps their blocks, locked in the prefix cache, until they were read or the deadline has
passed. One that decodes has blocks filled while the sequence waits, and gives them to the prefix cache, where the
sequence finds them when it starts; what has not come, or was evicted meanwhile, is computed as any other prompt.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fwk.engine.gate import WAIT_SECONDS, Gate
from fwk.engine.kv_block_manager import KVBlockManager
from fwk.engine.reserved_blocks import ReservedBlocks
from fwk.engine.sequence import Sequence
from fwk.types import KVSource

log = logging.getLogger(__name__)

MAX_FETCHES = 32
"""Prompts fetched at once; those behind them wait for their turn."""

Call = Callable[..., list[Any]]


class KVConnector(Gate):
    """What the scheduler asks. This one moves nothing: the server computes and decodes all of its requests."""

    @property
    def is_busy(self) -> bool:
        """Whether blocks are held for transfers, so that ``collect`` must be called."""
        return False

    def collect(self) -> None:
        """A step is about to be planned: take back the blocks of transfers that have ended."""

    @property
    def counts(self) -> TransferCounts:
        """What was transferred."""
        return TransferCounts()

    def finished(self, sequence: Sequence) -> None:
        """A sequence has ended by itself, and still has its blocks."""


@dataclass(slots=True)
class TransferCounts:
    """For ``EngineStats``, whose fields they are."""

    num_fetching: int = 0
    num_offered: int = 0
    kv_transfers: int = 0
    kv_transfer_failures: int = 0
    kv_transfer_bytes: int = 0
    kv_transfer_seconds: float = 0.0


@dataclass(slots=True)
class _Ended:
    """A transfer that has ended on every worker."""

    key: str
    is_whole: bool
    error: str


class _Polled(KVConnector):
    """Asks the workers for transfers that have ended, every ``interval`` steps."""

    def __init__(self, kv_blocks: KVBlockManager, call: Call, interval: int = 1) -> None:
        """call: runs an operation on all workers (``Executor.call``)."""
        self._kv_blocks = kv_blocks
        self._call = call
        self._interval = interval
        self._num_polls = 0
        self._parts: dict[str, list[tuple[bool, int, float, str]]] = {}  # what workers have told, until all have
        self._counts = TransferCounts()

    @property
    def counts(self) -> TransferCounts:
        return self._counts

    def collect(self) -> None:
        self._num_polls += 1
        if self.is_busy and self._num_polls % self._interval == 0:
            for ended in self._ended():
                self._take(ended)

    def _take(self, ended: _Ended) -> None:
        raise NotImplementedError

    def wait(self) -> None:
        if self.is_busy:
            self._num_polls = -1  # no step is held up by asking: ask at once
            time.sleep(WAIT_SECONDS)

    def _ended(self) -> list[_Ended]:
        answers = self._call("kv_poll")
        for told in answers:
            for key, *rest in told:
                self._parts.setdefault(key, []).append(tuple(rest))
        whole = [key for key, parts in self._parts.items() if len(parts) == len(answers)]
        return [self._joined(key, self._parts.pop(key)) for key in whole]

    def _joined(self, key: str, parts: list[tuple[bool, int, float, str]]) -> _Ended:
        is_whole = all(part[0] for part in parts)
        num_bytes = sum(part[1] for part in parts)
        if num_bytes and is_whole:
            self._counts.kv_transfers += 1
            self._counts.kv_transfer_bytes += num_bytes
            self._counts.kv_transfer_seconds += max(part[2] for part in parts)
        return _Ended(key, is_whole, next((part[3] for part in parts if part[3]), ""))


class KVOffers(_Polled):
    """Of a server that computes prompts: keeps their blocks for others."""

    def __init__(self, kv_blocks: KVBlockManager, call: Call, block_size: int) -> None:
        super().__init__(kv_blocks, call)
        self._block_size = block_size
        self._held: dict[str, Any] = {}  # locked nodes of the prefix cache, by key

    @property
    def is_busy(self) -> bool:
        return bool(self._held)

    def finished(self, sequence: Sequence) -> None:
        offer = sequence.request.kv_offer
        if offer is None or offer.key in self._held:
            return
        num_full = sequence.num_prompt_tokens // self._block_size
        blocks = sequence.blocks[: min(num_full, sequence.num_shared_blocks)]
        if blocks:
            self._kv_blocks.reservations.hold(sequence.node)
            self._held[offer.key] = sequence.node
            self._counts.num_offered = len(self._held)
            self._call("kv_offer", offer.key, blocks, offer.seconds)

    def _take(self, ended: _Ended) -> None:
        self._kv_blocks.reservations.let_go(self._held.pop(ended.key))
        self._counts.num_offered = len(self._held)
        if not ended.is_whole:
            self._counts.kv_transfer_failures += 1
            log.info("the K/V of a prompt were not fetched: %s", ended.error)


@dataclass(eq=False)
class _Fetch:
    """The prompt of a request, which another server has computed. ``reserved``: the blocks that are being filled."""

    source: KVSource
    deadline: float
    waiting: set[Sequence] = field(default_factory=set[Sequence])
    reserved: ReservedBlocks | None = None
    is_over: bool = False


class KVFetches(_Polled):
    """Of a server that decodes: holds sequences back while K/V of their prompts come from another.

    Their blocks are taken only where ``num_reserved_tokens`` more are left for each running sequence.
    """

    def __init__(
        self,
        kv_blocks: KVBlockManager,
        call: Call,
        *,
        block_size: int,
        num_running: Callable[[], int],
        num_reserved_tokens: int = 0,
        interval: int = 1,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(kv_blocks, call, interval)
        self._block_size = block_size
        self._num_running = num_running
        self._num_reserved_tokens = num_reserved_tokens
        self._now = now
        self._fetches: dict[str, _Fetch] = {}  # by request
        self._under_way: dict[str, _Fetch | None] = {}  # by key; None: an offer that is not wanted

    @property
    def is_busy(self) -> bool:
        return bool(self._under_way)

    def arrived(self, sequence: Sequence) -> None:
        source, request_id = sequence.request.kv_source, sequence.request.request_id
        if source is None or sequence.was_admitted:
            return
        fetch = self._fetches.get(request_id)
        if fetch is None:
            fetch = self._fetches[request_id] = _Fetch(source, self._now() + source.seconds)
        fetch.waiting.add(sequence)

    def lets_through(self, sequence: Sequence) -> bool:
        fetch = self._fetches.get(sequence.request.request_id)
        if fetch is None or fetch.is_over:
            return True
        return fetch.reserved is None and not self._begin(fetch, sequence)

    def started(self, sequence: Sequence) -> None:
        fetch = self._fetches.get(sequence.request.request_id)
        if fetch is None:
            return
        fetch.waiting.discard(sequence)
        if not fetch.waiting:
            del self._fetches[sequence.request.request_id]

    def ended(self, sequence: Sequence) -> None:
        fetch = self._fetches.get(sequence.request.request_id)
        self.started(sequence)
        if fetch is None or fetch.waiting or fetch.is_over:
            return
        if fetch.reserved is not None:
            self._call("kv_cancel", fetch.source.key)  # the blocks come back when nothing writes to them
        else:
            self._decline(fetch)

    def _begin(self, fetch: _Fetch, sequence: Sequence) -> bool:
        """Begin to fetch what the cache lacks; False: there is nothing to wait for."""
        match = self._kv_blocks.match(sequence)
        start = len(match.block_ids)
        end = min(fetch.source.num_blocks, sequence.num_matchable_tokens // self._block_size)
        count = end - start
        left = fetch.deadline - self._now()
        if count <= 0 or left <= 0:
            self._decline(fetch)
            return False
        if self._counts.num_fetching < MAX_FETCHES:
            num_spare = math.ceil(self._num_running() * self._num_reserved_tokens / self._block_size)
            reservations = self._kv_blocks.reservations
            fetch.reserved = reservations.reserve(match, sequence.token_ids, count, num_spare)
        if fetch.reserved is None:
            if self._num_running() or self._counts.num_fetching:
                return True  # until there is room, or the deadline has passed
            self._decline(fetch)
            return False
        self._under_way[fetch.source.key] = fetch
        self._counts.num_fetching += 1
        sequence.num_found_tokens = match.num_tokens
        source = fetch.source
        self._call("kv_receive", source.addresses, source.key, list(range(start, end)), fetch.reserved.block_ids, left)
        return True

    def _decline(self, fetch: _Fetch) -> None:
        """Tell the other side that its blocks are not wanted, so that it need not keep them."""
        fetch.is_over = True
        self._under_way[fetch.source.key] = None
        left = max(fetch.deadline - self._now(), 1.0)
        self._call("kv_receive", fetch.source.addresses, fetch.source.key, [], [], left)

    def _take(self, ended: _Ended) -> None:
        fetch = self._under_way.pop(ended.key)
        if fetch is None:
            return
        assert fetch.reserved is not None
        self._counts.num_fetching -= 1
        self._kv_blocks.reservations.settle(fetch.reserved, has_arrived=ended.is_whole)
        fetch.reserved, fetch.is_over = None, True
        if not ended.is_whole:
            self._counts.kv_transfer_failures += 1
            if fetch.waiting:
                log.warning(
                    "K/V of a prompt did not come from the prefill server, it is computed here: %s", ended.error
                )
