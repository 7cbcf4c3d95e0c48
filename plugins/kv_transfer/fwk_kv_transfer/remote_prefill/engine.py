"""K/V that outlives its sequences here, or comes before they start: the engine's side of transfers between servers.

A server that computes prompts keeps their blocks, locked in the prefix cache, until they were read or the deadline has
passed. One that decodes has blocks filled while the sequence waits, and gives them to the prefix cache, where the
sequence finds them when it starts; what has not come, or was evicted meanwhile, is computed as any other prompt.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fwk.interfaces.feature import Blocks, EnginePart, EnginePartContext, FeatureSequence, HeldBlocks, ReservedBlocks
from fwk_kv_transfer.remote_prefill import KVSource, RemotePrefillOptions, TransferCounts
from fwk_kv_transfer.remote_prefill.messages import offer_key

log = logging.getLogger(__name__)

MAX_FETCHES = 32
"""Prompts fetched at once; those behind them wait for their turn."""

DECLINE_SECONDS = 5.0
"""For another server to hear that its blocks are not wanted; one that does not keeps them until its deadline."""

WAIT_SECONDS = 0.001

MAX_KEPT_SHARE = 0.5
"""Of the KV cache, kept for decode servers that routers have chosen: who sends a prompt need not be one of ours."""


@dataclass(slots=True)
class _Ended:
    """A transfer that has ended on every worker."""

    key: str
    is_whole: bool
    error: str


class Transfers(EnginePart):
    """Asks the workers for transfers that have ended, every ``interval`` steps.

    A prefill server's engine has ``KVOffers``, a decode server's ``KVFetches``.
    """

    def __new__(cls, context: EnginePartContext) -> Transfers:
        options: RemotePrefillOptions = context.options
        return object.__new__(KVOffers if options.disaggregation_mode == "prefill" else KVFetches)

    def __init__(self, context: EnginePartContext, interval: int = 1) -> None:
        super().__init__(context)
        assert context.blocks is not None
        self._blocks: Blocks = context.blocks
        self._block_size = context.block_size
        self._call = context.call
        self._interval = interval
        self._num_polls = 0
        self._parts: dict[str, list[tuple[bool, int, float, str]]] = {}  # what workers have told, until all have
        self._counts = TransferCounts()

    def new(self, sequence: FeatureSequence) -> None:
        """The workers have no part in its steps."""

    def stats(self) -> msgspec.Struct:
        return self._counts

    def planning(self) -> None:
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
        answers = self._call("poll")
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


class KVOffers(Transfers):
    """Of a server that computes prompts: keeps their blocks for others."""

    def __init__(self, context: EnginePartContext) -> None:
        super().__init__(context)
        self._held: dict[str, HeldBlocks] = {}  # by key
        self._of_routers = set[str]()  # keys of those that are limited
        self._limited = Counter[int]()  # blocks of these, and how often each is kept
        self._max_limited: int | None = None

    @property
    def is_busy(self) -> bool:
        return bool(self._held)

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        return {"keeps": self._keeps, "withdraw": self._withdraw}

    def _keeps(self, key: str, readers: Any) -> list[dict[str, Any]] | None:
        """``KVExchange.about`` of each worker, if blocks are kept here for an order; ``readers`` may read them."""
        offers = self._offers(key)
        return self._call("about", readers, offers) if offers else None

    def _withdraw(self, key: str) -> None:
        """Keep the blocks of an order no longer."""
        for offered in self._offers(key):
            self._call("withdraw", offered)

    def _offers(self, key: str) -> list[str]:
        """What the K/V of an order are kept under, if they are."""
        return [offered for offered in self._held if offered.partition(".")[0] == key]

    def finished(self, sequence: FeatureSequence) -> None:
        """Keep the blocks of a prompt that was computed: its sequence has ended by its one token, not by an abort."""
        offer: KVSource = self.asked(sequence.request)
        is_computed = sequence.is_running and len(sequence.token_ids) > sequence.num_prompt_tokens
        key = offer_key(offer.key, sequence.request.cache_namespace)
        if not is_computed or key in self._held:
            return
        held = self._blocks.hold(sequence, sequence.num_prompt_tokens)
        if held is not None and offer.is_limited and not self._has_room(held):
            self._blocks.let_go(held)
            log.info("the K/V of a prompt are not kept for a decode server: half of the KV cache is already")
        elif held is not None:
            self._held[key] = held
            if offer.is_limited:
                self._of_routers.add(key)
                self._limited.update(held.block_ids)
            self._counts.num_kv_offered = len(self._held)
            self._call("offer", key, held.block_ids, offer.seconds, msgspec.to_builtins(offer.heads))

    def _has_room(self, held: HeldBlocks) -> bool:
        """Whether little enough is kept with these blocks."""
        if self._max_limited is None:
            self._max_limited = int(min(self._call("num_blocks")) * MAX_KEPT_SHARE)
        num_new = sum(block_id not in self._limited for block_id in held.block_ids)
        return len(self._limited) + num_new <= self._max_limited

    def _take(self, ended: _Ended) -> None:
        held = self._held.pop(ended.key)
        if ended.key in self._of_routers:
            self._of_routers.remove(ended.key)
            self._limited.subtract(held.block_ids)
            self._limited = +self._limited
        self._blocks.let_go(held)
        self._counts.num_kv_offered = len(self._held)
        if not ended.is_whole:
            self._counts.kv_transfer_failures += 1
            log.info("the K/V of a prompt were not fetched: %s", ended.error)


@dataclass(eq=False)
class _Fetch:
    """The prompt of a request, which another server has computed. ``reserved``: the blocks that are being filled."""

    source: KVSource
    deadline: float
    waiting: set[FeatureSequence] = field(default_factory=set[FeatureSequence])
    reserved: ReservedBlocks | None = None
    is_over: bool = False


class KVFetches(Transfers):
    """Of a server that decodes: holds sequences back while K/V of their prompts come from another.

    Their blocks are taken only where ``num_reserved_decode_tokens`` more are left for each running sequence.
    """

    def __init__(self, context: EnginePartContext, now: Callable[[], float] = time.monotonic) -> None:
        options: RemotePrefillOptions = context.options
        super().__init__(context, options.disaggregation_decode_polling_interval)
        self._num_running = context.num_running
        self._num_reserved_tokens = options.num_reserved_decode_tokens
        self._now = now
        self._begun: set[tuple[str, int]] = set()  # sequences that have run, and have not ended
        self._found: dict[tuple[str, int], int] = {}  # tokens that the cache had before blocks came from elsewhere
        self._fetches: dict[str, _Fetch] = {}  # by request
        self._under_way: dict[str, _Fetch | None] = {}  # by key; None: an offer that is not wanted
        self._trouble: str | None = None  # of the last transfer

    def trouble(self) -> str | None:
        return self._trouble

    @property
    def is_busy(self) -> bool:
        return bool(self._under_way)

    def arrived(self, sequence: FeatureSequence) -> None:
        request_id = sequence.request.request_id
        if sequence.key in self._begun:
            return
        fetch = self._fetches.get(request_id)
        if fetch is None:
            source: KVSource = self.asked(sequence.request)
            key = offer_key(source.key, sequence.request.cache_namespace)
            source = msgspec.structs.replace(source, key=key)
            fetch = self._fetches[request_id] = _Fetch(source, self._now() + source.seconds)
        fetch.waiting.add(sequence)

    def lets_through(self, sequence: FeatureSequence) -> bool:
        fetch = self._fetches.get(sequence.request.request_id)
        if fetch is None or fetch.is_over:
            return True
        return fetch.reserved is None and not self._begin(fetch, sequence)

    def started(self, sequence: FeatureSequence) -> None:
        self._begun.add(sequence.key)
        self._leave(sequence)

    def _leave(self, sequence: FeatureSequence) -> None:
        """It waits for its prompt no more."""
        fetch = self._fetches.get(sequence.request.request_id)
        if fetch is None:
            return
        fetch.waiting.discard(sequence)
        if not fetch.waiting:
            del self._fetches[sequence.request.request_id]

    def cached(self, sequence: FeatureSequence, count: int) -> int:
        return min(count, self._found.get(sequence.key, count))

    def forget(self, sequence: FeatureSequence) -> None:
        self._begun.discard(sequence.key)
        self._found.pop(sequence.key, None)

    def ended(self, sequence: FeatureSequence) -> None:
        fetch = self._fetches.get(sequence.request.request_id)
        self._leave(sequence)
        if fetch is None or fetch.waiting or fetch.is_over:
            return
        if fetch.reserved is not None:
            self._call("cancel", fetch.source.key)  # the blocks come back when nothing writes to them
        else:
            self._decline(fetch)

    def _begin(self, fetch: _Fetch, sequence: FeatureSequence) -> bool:
        """Begin to fetch what the cache lacks; False: there is nothing to wait for."""
        match = self._blocks.match(sequence)
        start = len(match.block_ids)
        end = min(fetch.source.num_blocks, sequence.num_matchable_tokens // self._block_size)
        count = end - start
        left = fetch.deadline - self._now()
        if count <= 0 or left <= 0:
            self._decline(fetch)
            return False
        if self._counts.num_kv_fetching < MAX_FETCHES:
            num_spare = math.ceil(self._num_running() * self._num_reserved_tokens / self._block_size)
            fetch.reserved = self._blocks.reserve(match, sequence.token_ids, count, num_spare)
        if fetch.reserved is None:
            if self._num_running() or self._counts.num_kv_fetching:
                return True  # until there is room, or the deadline has passed
            self._decline(fetch)
            return False
        self._under_way[fetch.source.key] = fetch
        self._counts.num_kv_fetching += 1
        self._found[sequence.key] = match.num_tokens
        self._receive(fetch.source, list(range(start, end)), fetch.reserved.block_ids, left)
        return True

    def _receive(self, source: KVSource, places: list[int], block_ids: list[int], seconds: float) -> None:
        heads = msgspec.to_builtins(source.heads)
        self._call("receive", source.addresses, source.key, places, block_ids, seconds, heads)

    def _decline(self, fetch: _Fetch) -> None:
        """Tell the other side that its blocks are not wanted, so that it need not keep them."""
        fetch.is_over = True
        self._under_way[fetch.source.key] = None
        left = min(max(fetch.deadline - self._now(), 1.0), DECLINE_SECONDS)
        self._receive(fetch.source, [], [], left)

    def _take(self, ended: _Ended) -> None:
        fetch = self._under_way.pop(ended.key)
        if fetch is None:
            return
        assert fetch.reserved is not None
        self._counts.num_kv_fetching -= 1
        self._blocks.settle(fetch.reserved, has_arrived=ended.is_whole)
        fetch.reserved, fetch.is_over = None, True
        if ended.is_whole:
            self._trouble = None
        else:
            self._counts.kv_transfer_failures += 1
            if fetch.waiting:
                self._trouble = (
                    f"K/V of a prompt did not come from the prefill server, it is computed here: {ended.error}"
                )
                log.warning("%s", self._trouble)
            else:  # called off, perhaps before the other side had heard of it
                self._decline(fetch)
