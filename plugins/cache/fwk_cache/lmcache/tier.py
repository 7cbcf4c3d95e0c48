"""Entries in an LMCache server."""

from __future__ import annotations

from fwk.errors import ConfigError
from fwk.interfaces.prefix_cache import CacheTierContext
from fwk_cache._common.remote_tier import RemoteTier
from fwk_cache._common.sealed import HEADER_BYTES
from fwk_cache.lmcache import LMCacheOptions
from fwk_cache.lmcache.connection import MAX_ENTRY, Connection, read_address


class LMCacheTier(RemoteTier[Connection]):
    """Entries are bytes of the model ``fwk``, whose chunk's hash is the entry's name.

    The server has no command to delete: what is damaged is no longer asked for, until it is written again.
    """

    def __init__(self, context: CacheTierContext) -> None:
        options: LMCacheOptions = context.options or LMCacheOptions()
        self._timeout = options.hicache_lmcache_timeout
        self._address = read_address(options.hicache_lmcache_url)
        self._damaged: set[bytes] = set()
        if context.block_bytes + HEADER_BYTES > MAX_ENTRY:
            raise ConfigError(
                f"--cache-tiers lmcache: an entry of an LMCache server has at most 2 GiB, and a block has "
                f"{context.block_bytes / 2**30:.2f}: choose a smaller --page-size"
            )
        super().__init__(context, self._address.place, "fwk-kv-lmcache", "see --hicache-lmcache-url")

    def _connect(self) -> Connection:
        return Connection(self._address, self._timeout)

    def _has(self, store: Connection, name: bytes) -> bool:
        return name not in self._damaged and store.has(name)

    def _put(self, store: Connection, name: bytes, whole: bytes) -> None:
        store.put(name, whole)
        store.has(name)  # answered once the entry is there, for connections of others too
        self._damaged.discard(name)

    def _forget(self, store: Connection, name: bytes) -> bool:
        self._damaged.add(name)
        return True

    def _name(self, key: bytes) -> bytes:
        return f"fwk@1@0@{self._hashed(key)}@uint8".encode()
