"""A machine that only holds ranks: ``fwk serve ... --node-rank 1``, joined to the engine on node 0."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from types import FrameType

import msgspec

from fwk.errors import EngineDead, FwkError
from fwk.interfaces.executor import NodeContext, WorkerNode
from fwk_executors.processes import ProcessesOptions
from fwk_executors.processes.messages import (
    Attach,
    Frames,
    FromLeader,
    Goodbye,
    Join,
    Placement,
    ToLeader,
    Trouble,
    Welcome,
    encode,
    frame,
)
from fwk_executors.processes.rank import ended, environment_of_ranks
from fwk_executors.processes.secret import interface_of, read_secret
from fwk_executors.processes.wire import HELLO_SECONDS, Keys, NoAnswer, NoPeer, shake_hands, tune
from fwk_process.parent import terminal_signals_blocked

AGAIN_SECONDS = 60.0
"""What a node waits, at most, for the engine that node 0 starts in place of one that has died."""

RETRY_SECONDS = 0.5
LOOK_SECONDS = 0.1
GOODBYE_SECONDS = 10.0
CLOSE_SECONDS = 2.0


class _Stopped(BaseException):
    """A signal that ends this node in good order."""


class _EngineLost(Exception):
    """The engine has ended, or its machine is gone; the sentence says how. Node 0 may start another."""


class _NotYet(Exception):
    """Nothing listens at the address, or it cannot be reached."""


class Link:
    """A proven connection to node 0."""

    def __init__(self, connection: socket.socket, keys: Keys) -> None:
        self.connection = connection
        self.keys = keys
        self.frames: Frames[FromLeader] = Frames(connection, FromLeader, keys.receiving)

    def send(self, message: ToLeader) -> None:
        self.connection.sendall(frame(encode(message), self.keys.sending))


class ProcessesNode(WorkerNode):
    """Joins the engine of node 0, starts this machine's ranks, and hands each a connection of its own to the engine.

    An engine that ends takes them with it. The node joins the next one if node 0 starts it, and ends otherwise.
    """

    def __init__(self, context: NodeContext) -> None:
        super().__init__(context)
        self._options: ProcessesOptions = context.options
        self._host, self._port = self._options.address()
        self._where = f"node 0 at {self._host}:{self._port}"
        self._secret = read_secret(self._options.dist_token_file or "")
        self._common = dict(context.common())
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _stop)
        say, seconds = self.context.say, self._options.dist_timeout
        say(f"node {self._options.node_rank} of {self._options.nnodes} joins {self._where}; it serves no HTTP itself")
        while True:
            try:
                return self._take_part(seconds)
            except _EngineLost as error:
                seconds = min(AGAIN_SECONDS, self._options.dist_timeout)
                say(f"{error}; this node waits up to {seconds:g} seconds for another engine there")
            except _Stopped:
                say(f"node {self._options.node_rank} was told to end")
                return 0

    def _take_part(self, seconds: float) -> int:
        """One engine's life. Returns the exit code once node 0 has ended for good."""
        link = self._joined(seconds)
        with contextlib.closing(link.connection):
            try:
                welcome = self._await(link)
                self._start_ranks(welcome.session)
                return self._follow(link)
            except _Stopped:
                with contextlib.suppress(OSError):
                    link.send(Trouble("was told to end"))
                raise
            finally:
                self._end_ranks()

    def _joined(self, seconds: float) -> Link:
        """A connection to node 0 on which this node has named itself."""
        end, why = time.monotonic() + seconds, ""
        while time.monotonic() < end:
            try:
                link = self._connect()
            except _NotYet as error:
                why = str(error)
                time.sleep(RETRY_SECONDS)
                continue
            link.send(Join(self._options.node_rank, self._common))
            return link
        raise EngineDead(f"{self._where} could not be joined within {seconds:g} seconds (--dist-timeout): {why}")

    def _connect(self) -> Link:
        """Raises ``_NotYet`` while there is nobody, ``NoPeer`` where another program answers or the secrets differ."""
        try:
            connection = socket.create_connection((self._host, self._port), timeout=HELLO_SECONDS)
        except OSError as error:
            raise _NotYet(error.strerror or str(error)) from None
        if connection.getsockname() == connection.getpeername():  # TCP connects a port of this machine to itself
            connection.close()
            raise _NotYet("nothing listens there")
        try:
            tune(connection)
            return Link(connection, shake_hands(connection, self._secret, is_leader=False))
        except (NoAnswer, OSError) as error:
            connection.close()
            raise _NotYet(str(error)) from None
        except NoPeer as error:
            connection.close()
            raise NoPeer(f"{self._where} {error}") from None

    def _await(self, link: Link) -> Welcome:
        """Node 0's word that all nodes are there."""
        while True:
            for message in self._messages(link):
                if isinstance(message, Welcome):
                    return message
                self._leave(message)

    def _messages(self, link: Link) -> list[FromLeader]:
        messages = link.frames.receive()
        if messages is None:
            raise _EngineLost(f"the engine on {self._where} {link.frames.why_gone} without a word")
        return messages

    def _leave(self, goodbye: Goodbye) -> int:
        if goodbye.exit_code is None:
            raise _EngineLost(f"the engine on {self._where} has ended: {goodbye.why}")
        if goodbye.exit_code:
            error = FwkError(goodbye.why)
            error.exit_code = goodbye.exit_code
            raise error
        self.context.say(f"{self._where} has ended, and so does this node")
        return 0

    def _start_ranks(self, session: str) -> None:
        per_node = self.context.tp_size // self._options.nnodes
        first = per_node * self._options.node_rank
        environment: dict[str, str] | None = None
        for rank in range(first, first + per_node):
            try:
                link = self._connect()
                link.send(Attach(session, rank))
            except (_NotYet, OSError) as error:
                raise _EngineLost(f"the engine on {self._where} takes no ranks: {error}") from None
            with link.connection as connection:
                if environment is None:
                    environment = environment_of_ranks(per_node, os.environ, interface_of(connection.getsockname()[0]))
                placement = Placement(self.context.recipe, link.keys.sending, link.keys.receiving)
                self._ranks[rank] = _start(connection, placement, environment)
        self.context.say(f"ranks {first} to {first + per_node - 1} of {self.context.tp_size} have been started here")

    def _follow(self, link: Link) -> int:
        """Wait for the engine's end, and tell it of the end of a rank."""
        told: set[int] = set()
        with selectors.DefaultSelector() as selector:
            selector.register(link.connection, selectors.EVENT_READ)
            end: float | None = None
            while end is None or time.monotonic() < end:
                if selector.select(LOOK_SECONDS):
                    for message in self._messages(link):
                        if isinstance(message, Goodbye):
                            return self._leave(message)
                for rank, process in self._ranks.items():
                    if process.poll() is not None and rank not in told:
                        told.add(rank)
                        with contextlib.suppress(OSError):
                            link.send(Trouble(ended(process.returncode), rank))
                        end = end or time.monotonic() + GOODBYE_SECONDS
        raise _EngineLost(f"a rank has ended here, and {self._where} does not react")

    def _end_ranks(self) -> None:
        ranks, self._ranks = list(self._ranks.values()), {}
        for process in ranks:
            assert process.stdin is not None
            process.stdin.close()  # which ends it
        end = time.monotonic() + CLOSE_SECONDS
        for process in ranks:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _stop(number: int, _: FrameType | None) -> None:
    raise _Stopped(number)


def _start(connection: socket.socket, placement: Placement, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """The process of a rank, to which the connection belongs from now on."""
    connection.settimeout(None)
    with terminal_signals_blocked():
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fwk_executors.processes.child", str(connection.fileno()), "placed"],
            stdin=subprocess.PIPE,
            pass_fds=[connection.fileno()],
            env=dict(environment),
            bufsize=0,
        )
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has died already
        process.stdin.write(msgspec.json.encode(placement) + b"\n")
    return process
