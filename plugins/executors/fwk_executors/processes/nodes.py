"""The other machines of a run, seen from the engine on node 0: how they come, and what is known of them."""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from fwk.errors import ConfigError, EngineDead
from fwk_executors.processes import ProcessesOptions
from fwk_executors.processes.messages import (
    Attach,
    Frames,
    FromRank,
    Goodbye,
    Join,
    ToLeader,
    Trouble,
    Welcome,
    encode,
    frame,
)
from fwk_executors.processes.rank import REAP_SECONDS
from fwk_executors.processes.secret import interface_of, is_loopback, read_secret
from fwk_executors.processes.wire import HELLO_SECONDS, Keys, NoPeer, shake_hands, tune
from fwk_http.strangers import Strangers

log = logging.getLogger("fwk.engine")

MAX_STRANGERS = 32
"""Connections that may be proving themselves at once; more are closed."""

MAX_WARNINGS = 10
LOOK_SECONDS = 0.5
SHOWN = 80
"""Characters of an option's value in a message."""


class Connected:
    """A proven connection, and its first message."""

    def __init__(self, connection: socket.socket, host: str, keys: Keys, frames: Frames[ToLeader]) -> None:
        self.connection = connection
        self.host = host
        self.keys = keys
        self.frames = frames

    def send(self, message: Welcome | Goodbye) -> None:
        """Raises ``OSError``, ``TimeoutError`` when it does not take it."""
        self.connection.settimeout(HELLO_SECONDS)
        self.connection.sendall(frame(encode(message), self.keys.sending))


class Node:
    """Another machine: its connection is open as long as it takes part."""

    def __init__(self, node_rank: int, connected: Connected) -> None:
        self.node_rank = node_rank
        self.connected = connected
        self.connection = connected.connection
        self.name = f"node {node_rank} ({connected.host})"
        self._ended: dict[int | None, str] = {}

    def send(self, message: Welcome | Goodbye) -> None:
        self.connected.send(message)

    def trouble(self) -> str | None:
        """Read what has come: a sentence if the node or one of its ranks has ended."""
        messages = self.connected.frames.receive()
        if messages is None:
            return self._ended.get(None) or f"{self.name} {self.connected.frames.why_gone}"
        for message in messages:
            if isinstance(message, Trouble):
                who = self.name if message.rank is None else self.worker(message.rank)
                self._ended[message.rank] = f"{who} {message.what}"
        return next(iter(self._ended.values()), None)

    def worker(self, rank: int) -> str:
        """How messages call one of its ranks."""
        return f"the engine's worker of rank {rank} on {self.name}"

    def ended(self, rank: int) -> str | None:
        """What the node says of a rank's end, or of its own; waits a moment for it."""
        end = time.monotonic() + 2 * REAP_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            while rank not in self._ended and None not in self._ended and (left := end - time.monotonic()) > 0:
                if selector.select(left) and self.trouble() is not None and not self._ended:
                    return None  # it is gone, too
        return self._ended.get(rank) or self._ended.get(None)


class RemoteRank:
    """A rank on another machine: what ``Rank`` is for one on this."""

    def __init__(self, rank: int, node: Node, connected: Connected) -> None:
        self.rank = rank
        self.connection = connected.connection
        self._node = node
        self._seal = connected.keys.sending
        self.frames: Frames[FromRank] = Frames(self.connection, FromRank, connected.keys.receiving)

    @property
    def name(self) -> str:
        return self._node.worker(self.rank)

    def send(self, body: bytes) -> None:
        self.connection.sendall(frame(body, self._seal))

    def obituary(self) -> str:
        return self._node.ended(self.rank) or f"{self.name} {self.frames.why_gone}"

    def state(self) -> str:
        return "silent"

    def release(self) -> None:
        self.connection.close()

    def reap(self, seconds: float) -> None:
        """Its node does."""


class Gathering:
    """Waits for the other nodes, and for their ranks, at ``--dist-init-addr``. Nothing listens there afterwards."""

    def __init__(self, options: ProcessesOptions, num_ranks: int, common: Mapping[str, str]) -> None:
        """Raises ``ConfigError`` when it cannot listen there, or when there is no secret."""
        assert options.dist_token_file is not None
        self._nnodes = options.nnodes
        self._per_node = num_ranks // options.nnodes
        self._common = common
        self._secret = read_secret(options.dist_token_file)
        self._end = time.monotonic() + options.dist_timeout
        self._timeout = options.dist_timeout
        self._session = secrets.token_hex(16)
        self._arrivals: queue.SimpleQueue[tuple[Connected, Join | Attach]] = queue.SimpleQueue()
        self._strangers = Strangers(MAX_STRANGERS)
        self._num_warnings = 0
        self._is_complete = False
        self.nodes: dict[int, Node] = {}
        self._listener = self._listen(*options.address())
        self.address: str = self._listener.getsockname()[0]
        log.info(
            "node 0 waits up to %g seconds for %d more at %s:%d%s",
            self._timeout,
            self._nnodes - 1,
            *self._listener.getsockname()[:2],
            ", which only this machine reaches" if is_loopback(self.address) else "",
        )
        threading.Thread(target=self._accept, name="fwk-nodes", daemon=True).start()

    def close(self) -> None:
        """Listen no longer. Idempotent."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def ranks(self) -> list[RemoteRank]:
        """All ranks of the other nodes, in order. Raises ``ConfigError`` for a node that differs, ``EngineDead`` for
        one that does not come within the time or leaves again."""
        while len(self.nodes) < self._nnodes - 1:
            connected, first = self._next(self._missing_nodes)
            if isinstance(first, Join):
                self._join(connected, first)
            else:
                connected.connection.close()
        self._is_complete = True
        for node in self.nodes.values():
            self._welcome(node)
        found: dict[int, RemoteRank] = {}
        first_rank = self._per_node
        while len(found) < self._per_node * (self._nnodes - 1):
            connected, first = self._next(lambda: f"ranks have not been started: {self._missing_ranks(found)}")
            is_ours = isinstance(first, Attach) and secrets.compare_digest(first.session, self._session)
            if not (isinstance(first, Attach) and is_ours and first.rank not in found):
                connected.connection.close()
                continue
            node = self.nodes.get(first.rank // self._per_node)
            if node is not None and first.rank >= first_rank:
                found[first.rank] = RemoteRank(first.rank, node, connected)
        return [found[rank] for rank in sorted(found)]

    @property
    def interface(self) -> str:
        """The network interface of the address."""
        return interface_of(self.address)

    def _listen(self, host: str, port: int) -> socket.socket:
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address[:2], family=family, backlog=MAX_STRANGERS)
        except OSError as error:
            raise ConfigError(
                f"node 0 cannot listen at --dist-init-addr {host}:{port}: {error.strerror or error}"
            ) from None

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:
                return  # closed
            self._strangers.enter(connection)
            threading.Thread(target=self._meet, args=(connection, str(address[0])), daemon=True).start()

    def _meet(self, connection: socket.socket, host: str) -> None:
        """Let a connection prove itself, and take its first message."""
        try:
            with self._strangers.proving(connection):
                tune(connection)
                keys = shake_hands(connection, self._secret, is_leader=True)
            frames: Frames[ToLeader] = Frames(connection, ToLeader, keys.receiving)
            connection.settimeout(HELLO_SECONDS)
            while not (messages := frames.receive()):
                if messages is None:
                    raise NoPeer("said nothing")
            connection.settimeout(None)
            first = messages[0]
            if isinstance(first, Trouble):
                raise NoPeer("did not say which node it is")
            self._arrivals.put((Connected(connection, host, keys, frames), first))
        except (NoPeer, OSError) as error:
            connection.close()
            self._num_warnings += 1
            level = logging.WARNING if self._num_warnings <= MAX_WARNINGS else logging.DEBUG
            log.log(level, "%s, which connected to --dist-init-addr, is sent away: it %s", host, error)

    def _next(self, missing: Callable[[], str]) -> tuple[Connected, Join | Attach]:
        while (left := self._end - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                return self._arrivals.get(timeout=min(left, LOOK_SECONDS))
            for node in self.nodes.values() if self._is_complete else ():
                if is_gone(node.connection):
                    raise EngineDead(f"{node.name} has left before its ranks had started")
        raise EngineDead(f"after {self._timeout:g} seconds (--dist-timeout) {missing()}")

    def _missing_nodes(self) -> str:
        missing = [str(rank) for rank in range(1, self._nnodes) if rank not in self.nodes]
        return f"node{'s' * (len(missing) > 1)} {', '.join(missing)} of {self._nnodes} had not come"

    def _missing_ranks(self, found: Mapping[int, Any]) -> str:
        return ", ".join(str(r) for r in range(self._per_node, self._per_node * self._nnodes) if r not in found)

    def _join(self, connected: Connected, join: Join) -> None:
        node = Node(join.node_rank, connected)
        why = difference(self._common, join.common, node.name)
        if why is not None:
            self._refuse(connected, why)
            raise ConfigError(why)
        before = self.nodes.get(join.node_rank)
        if before is not None and not is_gone(before.connection):
            why = f"--node-rank {join.node_rank} is taken: {before.name} has come before"
            log.warning("%s is sent away: %s", connected.host, why)
            self._refuse(connected, why)
            return
        log.info("%s has come (%d of %d)", node.name, len({*self.nodes, join.node_rank}) + 1, self._nnodes)
        self.nodes[join.node_rank] = node

    def _refuse(self, connected: Connected, why: str) -> None:
        with contextlib.suppress(OSError):
            connected.send(Goodbye(why, ConfigError.exit_code))
        connected.connection.close()

    def _welcome(self, node: Node) -> None:
        try:
            node.send(Welcome(self._session))
        except OSError:
            raise EngineDead(f"{node.name} has left before all others had come") from None


def difference(ours: Mapping[str, str], theirs: Mapping[str, str], name: str) -> str | None:
    """The first thing that node 0 and another one do not have in common, as a sentence; None when they agree."""
    for what in {**ours, **theirs}:
        here, there = ours.get(what, "not set"), theirs.get(what, "not set")
        if here != there:
            here, there = (text if len(text) <= SHOWN else f"{text[:SHOWN]}..." for text in (here, there))
            return f"{what} differs: {here} on node 0, {there} on {name}; start all nodes with the same"
    return None


def is_gone(connection: socket.socket) -> bool:
    """Whether the other side has closed."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
