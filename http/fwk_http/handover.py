"""A socket that listens goes from one server to the next, without a moment in which nothing listens.

A server offers its listener at an abstract unix socket, named after the address; no file is left by one that is killed.
Its successor takes a copy when it starts, and says when it serves. Until then the old one continues; what nobody has
accepted yet waits in the queue that both share. Only processes of the same user are talked to.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct

SECONDS = 5.0
"""What one message may take on this machine."""

READY = b"ready"
_CREDENTIALS = struct.Struct("3i")


class Predecessor:
    """The server whose listener was taken."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def replace(self) -> None:
        """Tell it that its successor serves, and wait until it accepts no more. Blocks, for seconds at most."""
        with self._connection, contextlib.suppress(OSError):  # one that has died accepts no more, either
            self._connection.sendall(READY)
            self._connection.recv(1)


def take_listener(wanted: tuple[str, int] | str) -> tuple[socket.socket, Predecessor] | None:
    """The listener at an address (or path), from the server there; None when none offers it. Raises ``OSError``."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(SECONDS)
        connection.connect(_name(wanted))
        if _user_of(connection) != os.geteuid():
            raise PermissionError("another user's process offers a listener of that name")
        _, descriptors, _, _ = socket.recv_fds(connection, 16, 1)
        if not descriptors:
            raise ConnectionError("the server there gives its listener to nobody")
    except (ConnectionRefusedError, FileNotFoundError):
        connection.close()
        return None
    except OSError:
        connection.close()
        raise
    os.set_inheritable(descriptors[0], False)
    listener = socket.socket(fileno=descriptors[0])
    is_listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if not is_listening or _address(listener) != wanted:
        listener.close()
        connection.close()
        raise ConnectionError("the server there gives another listener")
    return listener, Predecessor(connection)


class Offer:
    """Of a listener, to successors."""

    def __init__(self, listener: socket.socket) -> None:
        """Raises ``OSError`` when the name is taken."""
        self._listener = listener
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(_name(_address(listener)))
            self._socket.listen(4)
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_taken = asyncio.Event()

    async def taken(self) -> None:
        """Wait until a successor serves; those that end before that are forgotten."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket, self._accept)
        try:
            await self._is_taken.wait()
        finally:
            loop.remove_reader(self._socket)
            self._socket.close()  # before the successor is notified, whose own offer has the same name

    def release(self) -> None:
        """Nothing is accepted any more: let the successor know."""
        for task in self._tasks:
            task.cancel()

    def _accept(self) -> None:
        """Accept without ``loop.sock_accept``, which loses what it has accepted when it is cancelled."""
        loop = asyncio.get_running_loop()
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the successor has gone
        except OSError:  # out of files: a successor waits in the queue until there are some
            loop.remove_reader(self._socket)
            loop.call_later(1.0, self._accept_again)
            return
        task = loop.create_task(self._hand(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: connection.close())  # also of a task that is cancelled before it starts

    def _accept_again(self) -> None:
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._socket, self._accept)

    async def _hand(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        if _user_of(connection) != os.geteuid():
            return
        try:
            socket.send_fds(connection, [b"fwk"], [self._listener.fileno()])
            if await asyncio.get_running_loop().sock_recv(connection, len(READY)) == READY:
                self._is_taken.set()
                await asyncio.Future[None]()  # until released
        except OSError:
            return  # the successor has died: another may come


def _address(listener: socket.socket) -> tuple[str, int] | str:
    name = listener.getsockname()
    return name if listener.family == socket.AF_UNIX else (name[0], name[1])


def _name(address: tuple[str, int] | str) -> str:
    place = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
    return f"\0fwk-listener-{os.geteuid()}-{place}"[:100]


def _user_of(connection: socket.socket) -> int:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(raw)[1]
