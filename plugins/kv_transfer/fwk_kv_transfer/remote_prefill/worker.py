"""The worker's side of K/V that moves between servers: a transport over its KV cache, and what the engine calls."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from fwk.errors import ConfigError, PluginFault
from fwk.interfaces.feature import WorkerCache, WorkerPart, WorkerPartContext
from fwk.interfaces.kv_transfer import KVTransfer, KVTransferContext, Transfer
from fwk_kv_transfer.remote_prefill import RemotePrefillOptions

log = logging.getLogger(__name__)


class KVExchange(WorkerPart):
    """Passes the engine's orders on to a transport. Deadlines are seconds from now: clocks differ between machines."""

    _transport: KVTransfer | None = None
    _in_common: Mapping[str, str] = {}
    _address = b""
    _block_size = 0

    def __init__(self, context: WorkerPartContext) -> None:
        super().__init__(context)
        self._under_way = set[str]()  # keys that the transport is still to name

    def cache_allocated(self, cache: WorkerCache) -> None:
        """Open the transport. Raises ``ConfigError`` for a model without K/V, ``PluginError`` without a transport."""
        options: RemotePrefillOptions = self.context.options
        if not cache.layers:
            raise ConfigError(f"--disaggregation-mode {options.disaggregation_mode}: the model keeps no K/V")
        self._in_common, self._block_size, rank = dict(cache.in_common()), cache.block_size, self.context.rank
        identity = json.dumps([self._in_common, rank], sort_keys=True).encode()
        assert self.context.plugins is not None
        self._transport = self.context.plugins.choose(
            "kv_transfer",
            options.disaggregation_transfer_backend,
            KVTransferContext,
            kv_caches=[layer.kv_cache for layer in cache.layers if layer.kv_cache is not None],
            block_size=cache.block_size,
            identity=hashlib.blake2b(identity, digest_size=32).digest(),
            secret=options.secret(),
            rank=rank,
        )
        if options.disaggregation_mode == "prefill":
            self._address = self.transport.address()

    @property
    def transport(self) -> KVTransfer:
        """The worker's, once its KV cache is allocated."""
        assert self._transport is not None
        return self._transport

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        return {
            "about": self.about,
            "offer": self.offer,
            "withdraw": lambda key: self.transport.withdraw(key),
            "receive": self.receive,
            "cancel": lambda key: self.transport.cancel(key),
            "poll": self.poll,
        }

    def about(self) -> dict[str, Any]:
        """What another server's K/V must have in common with these, where offers are read, and tokens in a block."""
        return {"in_common": dict(self._in_common), "address": self._address, "block_size": self._block_size}

    def offer(self, key: str, block_ids: Sequence[int], seconds: float) -> None:
        """Let blocks be read under a key."""
        self._under_way.add(key)
        self.transport.offer(key, block_ids, time.monotonic() + seconds)

    def receive(
        self, addresses: Sequence[bytes], key: str, places: Sequence[int], block_ids: Sequence[int], seconds: float
    ) -> None:
        """Read places of what the worker of the same rank offers into blocks. addresses: by rank."""
        self._under_way.add(key)
        self.transport.receive(addresses[self.context.rank], key, places, block_ids, time.monotonic() + seconds)

    def poll(self) -> list[tuple[str, bool, int, float, str]]:
        """Key, whether it is whole, bytes, seconds and error of each transfer that has ended.

        Raises ``PluginFault`` in the transport's name for one that was not under way, or whose figures cannot be.
        """
        ended = self.transport.poll()
        for transfer in ended:
            why = self._misfit(transfer)
            if why is not None:
                who = getattr(self.transport.poll, "who", type(self.transport).__name__)
                told = f"{who} answered the end of {transfer.key!r:.100} in poll, {why}"
                log.error("%s", told)
                raise PluginFault(told)
            self._under_way.remove(transfer.key)
        return [(t.key, t.is_whole, int(t.num_bytes), float(t.seconds), t.error) for t in ended]

    def _misfit(self, ended: Transfer) -> str | None:
        """Why an end cannot be told to the engine."""
        if ended.key not in self._under_way:
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
        if self._transport is not None:
            self._transport.close()
