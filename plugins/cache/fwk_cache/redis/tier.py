"""Entries in a Redis server."""

from __future__ import annotations

from fwk.errors import ConfigError
from fwk.interfaces.prefix_cache import CacheTierContext
from fwk_cache._common.remote_tier import RemoteTier
from fwk_cache.redis import RedisOptions
from fwk_cache.redis.connection import Connection, read_address


class RedisTier(RemoteTier[Connection]):
    """Entries are ``fwk:kv:NAME``; the server forgets them after ``--hicache-redis-ttl``, or as its policy says."""

    def __init__(self, context: CacheTierContext) -> None:
        options: RedisOptions = context.options or RedisOptions()
        self._options = options
        self._address = read_address(options.hicache_redis_url)
        if options.hicache_redis_user is not None and options.hicache_redis_password is None:
            raise ConfigError("--hicache-redis-user needs --hicache-redis-password")
        super().__init__(context, self._address.place, "fwk-kv-redis", "see --hicache-redis-password")

    def _connect(self) -> Connection:
        options = self._options
        password, timeout = options.hicache_redis_password, options.hicache_redis_timeout
        return Connection(self._address, options.hicache_redis_user, password, timeout)

    def _has(self, store: Connection, name: bytes) -> bool:
        return store.command(b"TOUCH", name) == 1

    def _put(self, store: Connection, name: bytes, whole: bytes) -> None:
        store.command(b"SET", name, whole, b"EX", b"%d" % self._options.hicache_redis_ttl)

    def _forget(self, store: Connection, name: bytes) -> bool:
        return store.command(b"DEL", name) == 1

    def _name(self, key: bytes) -> bytes:
        return b"fwk:kv:" + self._hashed(key).encode()
