"""Entries in a Redis server, read where they are asked for and written by a thread."""

from __future__ import annotations

from collections.abc import Callable

from fwk.errors import ConfigError
from fwk.interfaces.prefix_cache import CacheTier, CacheTierContext
from fwk_cache._common.sealed import HEADER_BYTES, header, name_of
from fwk_cache._common.writer import Writer
from fwk_cache.redis import RedisOptions
from fwk_cache.redis.connection import Connection, Refused, WrongSize, read_address


class RedisTier(CacheTier):
    """Entries are ``fwk:kv:NAME``, with the header that files have: what is damaged or of another model is a miss.

    Reader and writer have a connection each. A server that fails is left alone for a while (``PAUSE_SECONDS``), so that
    its time-out is waited for once, not for each block.
    """

    def __init__(self, context: CacheTierContext) -> None:
        super().__init__(context)
        options: RedisOptions = context.options or RedisOptions()
        self._options = options
        self._address = read_address(options.hicache_redis_url)
        if options.hicache_redis_user is not None and options.hicache_redis_password is None:
            raise ConfigError("--hicache-redis-user needs --hicache-redis-password")
        self._reader: Connection | None = None
        self._writes: Connection | None = None
        self._writer = Writer(self._write, context.block_bytes, self._address.place, "fwk-kv-redis")
        try:
            self._reader = self._connect()
        except Refused as error:
            self._writer.close()
            raise ConfigError(f"{self._address.place} refuses: {error}; see --hicache-redis-password") from None
        except OSError as error:
            self._writer.pause(error)  # it may come later

    def contains(self, key: bytes) -> bool:
        if key in self._writer.waiting:
            return True
        return self._ask(lambda redis: redis.command(b"TOUCH", self._name(key)) == 1)

    def get(self, key: bytes, into: memoryview) -> bool:
        waiting = self._writer.waiting.get(key)
        if waiting is not None:
            into[:] = waiting
            return True
        head, name = bytearray(HEADER_BYTES), self._name(key)
        try:
            if not self._ask(lambda redis: redis.fetch(name, head, into)):
                return False
            if bytes(head) == header(self.context.identity, key, into):
                return True
        except WrongSize:  # no reader of it is left, and there may be more of it to come
            self._hang_up()
        self._ask(lambda redis: redis.command(b"DEL", name) == 1)
        return False

    def put(self, key: bytes, data: memoryview) -> bool:
        return self._writer.put(key, data)

    def close(self) -> None:
        self._writer.close()
        for connection in (self._reader, self._writes):
            if connection is not None:
                connection.close()

    def _name(self, key: bytes) -> bytes:
        return b"fwk:kv:" + name_of(self.context.identity, key).encode()

    def _connect(self) -> Connection:
        options = self._options
        password, timeout = options.hicache_redis_password, options.hicache_redis_timeout
        return Connection(self._address, options.hicache_redis_user, password, timeout)

    def _ask(self, question: Callable[[Connection], bool]) -> bool:
        """Ask the server; False when it is of no use. One that has closed an old connection is asked by a new one."""
        if self._writer.is_paused:
            return False
        for is_last in (self._reader is None, True):
            try:
                if self._reader is None:
                    self._reader = self._connect()
                return question(self._reader)
            except WrongSize:
                raise
            except Refused as error:
                self._writer.pause(error)
                return False
            except OSError as error:
                self._hang_up()
                if is_last or not isinstance(error, ConnectionError):
                    self._writer.pause(error)
                    return False
        return False

    def _hang_up(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _write(self, key: bytes, data: memoryview) -> None:
        if self._writes is None:
            self._writes = self._connect()
        whole = header(self.context.identity, key, data) + bytes(data)
        try:
            self._writes.command(b"SET", self._name(key), whole, b"EX", b"%d" % self._options.hicache_redis_ttl)
        except OSError as error:
            if not isinstance(error, Refused):
                self._writes.close()
                self._writes = None
            if not isinstance(error, ConnectionError):  # an old connection was closed: this entry is lost, no more
                raise
