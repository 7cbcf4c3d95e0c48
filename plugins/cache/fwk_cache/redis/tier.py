"""Entries in a Redis server, read where they are asked for and written by a thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fwk.errors import ConfigError
from fwk.interfaces.prefix_cache import CacheTier, CacheTierContext
from fwk_cache._common.sealed import HEADER_BYTES, header, name_of
from fwk_cache._common.writer import READING, Writer
from fwk_cache.redis import RedisOptions
from fwk_cache.redis.connection import Connection, Refused, WrongSize, read_address


class Reader:
    """A connection that asks, made when it is needed."""

    def __init__(self, connect: Callable[[], Connection], writer: Writer) -> None:
        """writer: it knows whether the server is to be left alone."""
        self._connect = connect
        self._writer = writer
        self._connection: Connection | None = None

    def connect(self) -> Connection:
        """Raises ``OSError``."""
        self._connection = self._connect()
        return self._connection

    def ask(self, question: Callable[[Connection], bool]) -> bool:
        """Ask the server; False when it is of no use. One that has closed an old connection is asked by a new one."""
        if self._writer.is_paused:
            return False
        for is_last in (self._connection is None, True):
            try:
                found = question(self._connection or self.connect())
                self._writer.works(READING)
                return found
            except WrongSize:
                raise
            except Refused as error:
                self._writer.pause(error, READING)
                return False
            except OSError as error:
                self.hang_up()
                if is_last or not isinstance(error, ConnectionError):
                    self._writer.pause(error, READING)
                    return False
        return False

    def hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class RedisTier(CacheTier):
    """Entries are ``fwk:kv:NAME``, with the header that files have: what is damaged or of another model is a miss.

    Reader, reader ahead and writer have a connection each. A server that fails is left alone for a while
    (``PAUSE_SECONDS``), so that its time-out is waited for once, not for each block.
    """

    def __init__(self, context: CacheTierContext) -> None:
        super().__init__(context)
        options: RedisOptions = context.options or RedisOptions()
        self._options = options
        self._address = read_address(options.hicache_redis_url)
        if options.hicache_redis_user is not None and options.hicache_redis_password is None:
            raise ConfigError("--hicache-redis-user needs --hicache-redis-password")
        self._writes: Connection | None = None
        self._writer = Writer(self._write, context.block_bytes, self._address.place, "fwk-kv-redis")
        self._reader = Reader(self._connect, self._writer)
        self._ahead = Reader(self._connect, self._writer)
        try:
            self._reader.connect()
        except Refused as error:
            self._writer.close()
            raise ConfigError(f"{self._address.place} refuses: {error}; see --hicache-redis-password") from None
        except OSError as error:
            self._writer.pause(error, READING)  # it may come later

    def contains(self, key: bytes) -> bool:
        if key in self._writer.waiting:
            return True
        return self._reader.ask(lambda redis: redis.command(b"TOUCH", self._name(key)) == 1)

    def get(self, key: bytes, into: memoryview) -> bool:
        return self._get(self._reader, key, into)

    def reader(self) -> Callable[[bytes, memoryview], bool]:
        return partial(self._get, self._ahead)

    def put(self, key: bytes, data: memoryview) -> bool:
        return self._writer.put(key, data)

    @property
    def trouble(self) -> str | None:
        return self._writer.trouble

    def close(self) -> None:
        self._writer.close()
        for reader in (self._reader, self._ahead):
            reader.hang_up()
        if self._writes is not None:
            self._writes.close()

    def _get(self, reader: Reader, key: bytes, into: memoryview) -> bool:
        waiting = self._writer.waiting.get(key)
        if waiting is not None:
            into[:] = waiting
            return True
        head, name = bytearray(HEADER_BYTES), self._name(key)
        try:
            if not reader.ask(lambda redis: redis.fetch(name, head, into)):
                return False
            if bytes(head) == header(self.context.identity, key, into):
                return True
        except WrongSize:  # no reader of it is left, and there may be more of it to come
            reader.hang_up()
        reader.ask(lambda redis: redis.command(b"DEL", name) == 1)
        return False

    def _name(self, key: bytes) -> bytes:
        return b"fwk:kv:" + name_of(self.context.identity, key).encode()

    def _connect(self) -> Connection:
        options = self._options
        password, timeout = options.hicache_redis_password, options.hicache_redis_timeout
        return Connection(self._address, options.hicache_redis_user, password, timeout)

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
