"""Entries in a server that several servers share: read where they are asked for, and written by a thread."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Generic, Protocol, TypeVar

from fwk.errors import ConfigError
from fwk.interfaces.prefix_cache import CacheTier, CacheTierContext
from fwk_cache._common.sealed import HEADER_BYTES, header, name_of
from fwk_cache._common.timed_socket import Refused, WrongSize
from fwk_cache._common.writer import READING, Writer


class Store(Protocol):
    """A connection. One caller at a time; any ``OSError`` but ``Refused`` leaves it of no more use."""

    def fetch(self, key: bytes, head: bytearray, into: memoryview) -> bool:
        """An entry into two buffers; False when there is none, ``WrongSize`` when they are not its size together."""
        ...

    def close(self) -> None: ...


S = TypeVar("S", bound=Store)


class Reader(Generic[S]):
    """A connection that asks, made when it is needed."""

    def __init__(self, connect: Callable[[], S], writer: Writer) -> None:
        """writer: it knows whether the server is to be left alone."""
        self._connect = connect
        self._writer = writer
        self._connection: S | None = None

    def connect(self) -> S:
        """Raises ``OSError``."""
        self._connection = self._connect()
        return self._connection

    def ask(self, question: Callable[[S], bool]) -> bool:
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


class RemoteTier(CacheTier, Generic[S]):
    """Entries have the header that files have: what is damaged or of another model is a miss.

    Reader, reader ahead and writer have a connection each. A server that fails is left alone for a while
    (``PAUSE_SECONDS``), so that its time-out is waited for once, not for each block.
    """

    def __init__(self, context: CacheTierContext, place: str, thread: str, hint: str) -> None:
        """place: the server, for the log; thread: the writer's name; hint: what helps where the server refuses.

        Raises ``ConfigError`` when it does.
        """
        super().__init__(context)
        self._writes: S | None = None
        self._writer = Writer(self._write, context.block_bytes, place, thread)
        self._reader = Reader(self._connect, self._writer)
        self._ahead = Reader(self._connect, self._writer)
        try:
            self._reader.connect()
        except Refused as error:
            self._writer.close()
            raise ConfigError(f"{place} refuses: {error}; {hint}") from None
        except OSError as error:
            self._writer.pause(error, READING)  # it may come later

    @abstractmethod
    def _connect(self) -> S:
        """A connection of its own for each of three threads. Raises ``OSError``."""

    @abstractmethod
    def _has(self, store: S, name: bytes) -> bool:
        """Whether there is an entry, which counts as a use of it. Raises ``OSError``, as the next two do."""

    @abstractmethod
    def _put(self, store: S, name: bytes, whole: bytes) -> None:
        """Keep an entry: the header and the bytes."""

    @abstractmethod
    def _forget(self, store: S, name: bytes) -> bool:
        """An entry is damaged: it is no longer found, until it is put again. Whether it was there."""

    @abstractmethod
    def _name(self, key: bytes) -> bytes:
        """What an entry is called in the server."""

    def contains(self, key: bytes) -> bool:
        if key in self._writer.waiting:
            return True
        name = self._name(key)
        return self._reader.ask(lambda store: self._has(store, name))

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

    def _get(self, reader: Reader[S], key: bytes, into: memoryview) -> bool:
        waiting = self._writer.waiting.get(key)
        if waiting is not None:
            into[:] = waiting
            return True
        head, name = bytearray(HEADER_BYTES), self._name(key)
        try:
            if not reader.ask(lambda store: store.fetch(name, head, into)):
                return False
            if bytes(head) == header(self.context.identity, key, into):
                return True
        except WrongSize:  # no reader of it is left, and there may be more of it to come
            reader.hang_up()
        reader.ask(lambda store: self._forget(store, name))
        return False

    def _hashed(self, key: bytes) -> str:
        """A name for an entry that tells nothing of its content: 40 hexadecimal digits."""
        return name_of(self.context.identity, key)

    def _write(self, key: bytes, data: memoryview) -> None:
        if self._writes is None:
            self._writes = self._connect()
        whole = header(self.context.identity, key, data) + bytes(data)
        try:
            self._put(self._writes, self._name(key), whole)
        except OSError as error:
            if not isinstance(error, Refused):
                self._writes.close()
                self._writes = None
            if not isinstance(error, ConnectionError):  # an old connection was closed: this entry is lost, no more
                raise
