"""The worker's side of K/V that moves between servers: transports over its KV cache, and what the engine calls."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import msgspec

from fwk.errors import ConfigError, FwkError, PluginFault
from fwk.interfaces.feature import WorkerCache, WorkerPart, WorkerPartContext
from fwk.interfaces.kv_transfer import KVTransfer, KVTransferContext, Transfer
from fwk_kv_transfer.remote_prefill import Heads, RemotePrefillOptions
from fwk_kv_transfer.remote_prefill.heads import cut, heads_of, misfit, pieces

log = logging.getLogger(__name__)

MAX_OTHERS = 8
"""Ways of sharing heads of other servers that a worker has transports for."""


@dataclass(eq=False, slots=True)
class _Transfer:
    """What goes by several transports under one key. waiting: those that are still to name it."""

    waiting: set[KVTransfer]
    ended: list[Transfer] = field(default_factory=list[Transfer])


class KVExchange(WorkerPart):
    """Passes the engine's orders on to transports. Deadlines are seconds from now: clocks differ between machines.

    For each worker of another server that reads from this one, or is read from, there is a transport, over the heads
    that both have: all of them where the servers have the same number of ranks.
    """

    _heads = Heads(1, ())
    _in_common: Mapping[str, str] = {}
    _cache: WorkerCache

    def __init__(self, context: WorkerPartContext) -> None:
        super().__init__(context)
        self._transports: dict[Heads, dict[int, KVTransfer]] = {}  # by how others share heads, and the rank there
        self._num_transports = 0
        self._under_way: dict[str, _Transfer] = {}
        self._unclaimed: dict[str, tuple[Sequence[int], float]] = {}  # offers without readers: blocks and deadline
        self._failed: list[Transfer] = []  # what no transport has begun

    def cache_allocated(self, cache: WorkerCache) -> None:
        """Open a transport. Raises ``ConfigError`` for a model without K/V, ``PluginError`` without a transport."""
        options: RemotePrefillOptions = self.context.options
        if not cache.layers:
            raise ConfigError(f"--disaggregation-mode {options.disaggregation_mode}: the model keeps no K/V")
        self._in_common, self._cache = dict(cache.in_common()), cache
        self._heads = heads_of(cache.layers, self.context.size)
        for transport in self._with(self._heads).values():
            if options.disaggregation_mode == "prefill":
                transport.address()

    def _with(self, others: Heads) -> Mapping[int, KVTransfer]:
        """The transports between this worker and those of servers that share heads so, by their rank.

        Raises ``FwkError`` where there can be none.
        """
        if others not in self._transports:
            is_prefill = self.context.options.disaggregation_mode == "prefill"
            why = misfit(self._heads, others) if is_prefill else misfit(others, self._heads)
            if why is None and len(self._transports) == MAX_OTHERS:
                why = f"servers with {MAX_OTHERS} other numbers of ranks exchange K/V with this one already"
            if why is not None:
                raise ConfigError(why)
            made: dict[int, KVTransfer] = {}
            for other, wanted in self._shared(others, is_prefill).items():
                ends = (self.context.rank, other) if is_prefill else (other, self.context.rank)
                shared = (self._heads, others) if is_prefill else (others, self._heads)
                made[other] = self._open([*ends, *shared], wanted)
            self._transports[others] = made
        return self._transports[others]

    def _shared(self, others: Heads, is_prefill: bool) -> dict[int, list[tuple[int, int, int]]]:
        """Layer, first head here and their number, of all that this worker has in common with others, by their rank."""
        rank = self.context.rank
        if not is_prefill:
            read = pieces(others, self._heads, rank)
            return {source: [(x.layer, x.first_here, x.count) for x in found] for source, found in read.items()}
        readers = {reader: pieces(self._heads, others, reader).get(rank) for reader in range(others.num_ranks)}
        return {
            reader: [(x.layer, x.first_there, x.count) for x in found] for reader, found in readers.items() if found
        }

    def _open(self, between: Sequence[Any], wanted: list[tuple[int, int, int]]) -> KVTransfer:
        options: RemotePrefillOptions = self.context.options
        layers = [(layer.kv_cache, layer.head_dim) for layer in self._cache.layers if layer.kv_cache is not None]
        known = json.dumps([self._in_common, msgspec.to_builtins(between)], sort_keys=True).encode()
        number = self.context.rank + self._num_transports * self.context.size
        self._num_transports += 1
        assert self.context.plugins is not None
        return self.context.plugins.choose(
            "kv_transfer",
            options.disaggregation_transfer_backend,
            KVTransferContext,
            kv_caches=cut([cache for cache, _ in layers], [head_dim for _, head_dim in layers], wanted),
            block_size=self._cache.block_size,
            identity=hashlib.blake2b(known, digest_size=32).digest(),
            secret=options.secret(),
            rank=number,
        )

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        return {
            "about": self.about,
            "num_blocks": self.num_blocks,
            "offer": self.offer,
            "withdraw": self.withdraw,
            "receive": self.receive,
            "cancel": self.cancel,
            "poll": self.poll,
        }

    def num_blocks(self) -> int:
        """Of the KV cache, of the layer that has the fewest."""
        return min(len(layer.kv_cache) for layer in self._cache.layers if layer.kv_cache is not None)

    def about(self, others: Any = None, keys: Sequence[str] = ()) -> dict[str, Any]:
        """What another server's K/V must have in common with these, how heads are shared, and tokens in a block.

        With ``others``, the ``Heads`` of a server that is to read: ``addresses``, by its rank, where each reads from
        this worker, empty for those that do not; or ``error``, why none can. What is offered under ``keys`` and has
        no readers yet is offered to these from then on.
        """
        found = {
            "in_common": dict(self._in_common),
            "heads": msgspec.to_builtins(self._heads),
            "block_size": self._cache.block_size,
        }
        if others is None:
            return found
        readers = msgspec.convert(others, Heads)
        try:
            transports = self._with(readers)
            addresses = {rank: transport.address() for rank, transport in transports.items()}
        except FwkError as error:
            return {**found, "error": str(error)}
        for key in [key for key in keys if key in self._unclaimed]:
            self._offer(key, *self._unclaimed.pop(key), others)
        return {**found, "addresses": [addresses.get(rank, b"") for rank in range(readers.num_ranks)]}

    def offer(self, key: str, block_ids: Sequence[int], seconds: float, others: Any) -> None:
        """Let blocks be read under a key by workers of a server that shares heads so (``Heads``).

        Without others, they are kept until ``about`` is asked by those that are to read, or till the deadline.
        """
        if others is None:
            self._unclaimed[key] = block_ids, time.monotonic() + seconds
        else:
            self._offer(key, block_ids, time.monotonic() + seconds, others)

    def _offer(self, key: str, block_ids: Sequence[int], deadline: float, others: Any) -> None:
        self._begin(key, others, lambda transport, rank: transport.offer(key, block_ids, deadline))

    def receive(
        self,
        addresses: Sequence[Sequence[bytes]],
        key: str,
        places: Sequence[int],
        block_ids: Sequence[int],
        seconds: float,
        others: Any,
    ) -> None:
        """Read places of what others offer into blocks. addresses: by rank there, of each by rank here."""
        deadline, mine = time.monotonic() + seconds, self.context.rank
        self._begin(
            key,
            others,
            lambda transport, rank: transport.receive(addresses[rank][mine], key, places, block_ids, deadline),
        )

    def _begin(self, key: str, others: Any, begin: Callable[[KVTransfer, int], None]) -> None:
        """Begin a transfer with all workers there that have to do with this one; it ends when all of them have."""
        try:
            transports = self._with(msgspec.convert(others, Heads))
        except FwkError as error:
            self._failed.append(Transfer(key, False, error=str(error)))
            return
        if not transports:
            self._failed.append(Transfer(key, True))  # others have what this worker has
            return
        self._under_way[key] = _Transfer(set(transports.values()))
        for rank, transport in transports.items():
            begin(transport, rank)

    def withdraw(self, key: str) -> None:
        """End an offer."""
        if self._unclaimed.pop(key, None) is not None:
            self._failed.append(Transfer(key, False, error="it was withdrawn"))
        for transport in self._waiting(key):
            transport.withdraw(key)

    def cancel(self, key: str) -> None:
        """End a reception."""
        for transport in self._waiting(key):
            transport.cancel(key)

    def _waiting(self, key: str) -> list[KVTransfer]:
        found = self._under_way.get(key)
        return [] if found is None else list(found.waiting)

    def poll(self) -> list[tuple[str, bool, int, float, str]]:
        """Key, whether it is whole, bytes, seconds and error of each transfer that has ended.

        Raises ``PluginFault`` in the transport's name for one that was not under way, or whose figures cannot be.
        """
        for transport in [made for others in self._transports.values() for made in others.values()]:
            for ended in transport.poll():
                why = self._misfit(transport, ended)
                if why is not None:
                    who = getattr(transport.poll, "who", type(transport).__name__)
                    told = f"{who} answered the end of {ended.key!r:.100} in poll, {why}"
                    log.error("%s", told)
                    raise PluginFault(told)
                found = self._under_way[ended.key]
                found.waiting.remove(transport)
                found.ended.append(ended)
        now = time.monotonic()
        for key in [key for key, (_, deadline) in self._unclaimed.items() if deadline <= now]:
            del self._unclaimed[key]
            self._failed.append(Transfer(key, False, error="no server has asked where to read them"))
        over = [key for key, found in self._under_way.items() if not found.waiting]
        ended, self._failed = [_joined(key, self._under_way.pop(key).ended) for key in over] + self._failed, []
        return [(t.key, t.is_whole, int(t.num_bytes), float(t.seconds), t.error) for t in ended]

    def _misfit(self, transport: KVTransfer, ended: Transfer) -> str | None:
        """Why an end cannot be told to the engine."""
        found = self._under_way.get(ended.key)
        if found is None or transport not in found.waiting:
            return "which is not under way"
        if not isinstance(ended.is_whole, bool) or not isinstance(ended.error, str):
            return f"of which is_whole is {ended.is_whole!r:.100} and error {ended.error!r:.100}"
        kinds: dict[str, Any] = {"num_bytes": Integral, "seconds": Real}
        for name, kind in kinds.items():
            figure: Any = getattr(ended, name)
            is_number = isinstance(figure, kind) and not isinstance(figure, bool)
            if not is_number or not 0 <= figure < math.inf:
                return f"of which {name} is {figure!r:.100}"
        return None

    def close(self) -> None:
        for others in self._transports.values():
            for transport in others.values():
                transport.close()


def _joined(key: str, ended: Sequence[Transfer]) -> Transfer:
    """One transfer of those by several transports."""
    return Transfer(
        key,
        all(x.is_whole for x in ended),
        sum(x.num_bytes for x in ended),
        max(x.seconds for x in ended),
        next((x.error for x in ended if x.error), ""),
    )
