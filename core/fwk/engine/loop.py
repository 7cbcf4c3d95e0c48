"""The engine's side of the wire: receive, step, send."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import zmq

from fwk.engine.core import Engine
from fwk.errors import EngineDead, FwkError, PluginFault
from fwk.types import (
    Abort,
    AddRequest,
    CallFeature,
    CallWorkers,
    EngineFailed,
    EngineReady,
    EngineStats,
    FromEngine,
    Pause,
    Ping,
    Pong,
    Shutdown,
    StepOutputs,
    ToEngine,
    TokenEvent,
    WorkersAnswer,
)
from fwk.types.messages import PROTOCOL
from fwk_process.malloc import Heap

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 2**20
IDLE_POLL_MS = 500
MESSAGES_PER_STEP = 1000
"""Messages taken in between two steps at most, so that a flood of requests does not stop those under way."""


def bind(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """The engine's socket: its client connects to it and is answered by its identity."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 500)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, 0)  # never drop: the loop's own admission bounds what is in flight
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(address)
    return socket


def meet(socket: zmq.Socket[bytes], address: str, client: str) -> None:
    """Wait for the client's first message. No other process can connect afterwards: the socket has no path any more."""
    while socket.recv_multipart()[0] != client.encode():
        log.warning("dropped a message that came from a stranger")
    Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


class EngineLoop:
    """Runs an engine for the one client of a socket, known by its identity, until a ``Shutdown`` comes.

    What others send, what is not of the protocol, and a request that is here already, is dropped and counted.
    """

    def __init__(self, engine: Engine, socket: zmq.Socket[bytes], ready: EngineReady, client: bytes) -> None:
        self._engine = engine
        self._socket = socket
        self._ready = ready
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._client = client
        self._has_greeted = False
        self._stopping = False
        self._num_dropped = self._num_calls = 0
        self._heap = Heap()

    def run(self) -> None:
        """Receive, step, send; raises what the engine raises."""
        while not self._stopping:
            self._receive()
            if self._engine.has_work:
                self._send_events(self._engine.step())
            else:
                self._engine.check()
                self._heap.rest(self._engine.stats().steps + self._num_calls)

    def fail(self, message: str, detail: str) -> None:
        """Tell the client that this engine will answer nothing more; ``detail`` is for its log."""
        if self._has_greeted:
            self._send(EngineFailed(message, detail))

    def _receive(self) -> None:
        timeout = 0 if self._engine.has_work else IDLE_POLL_MS
        num_taken = 0
        while num_taken < MESSAGES_PER_STEP:
            if not self._socket.poll(timeout):
                return
            timeout = 0
            client, *parts = self._socket.recv_multipart()
            num_taken += max(len(parts), 1)
            if client != self._client:
                self._drop("came from a stranger")
                continue
            for part in parts:
                self._take(part)
            if self._stopping:
                return

    def _take(self, part: bytes) -> None:
        try:
            message = self._decoder.decode(part)
        except (msgspec.DecodeError, ValueError) as error:
            self._drop(f"is not of the protocol: {error}")
        else:
            self._handle(message)

    def _drop(self, why: str) -> None:
        self._num_dropped += 1
        log.warning("dropped a message that %s", why)

    def _handle(self, message: ToEngine) -> None:
        match message:
            case AddRequest(request) if self._engine.scheduler.knows(request.request_id):
                self._drop("adds a request that is here already")
            case AddRequest(request):
                self._send_events(self._engine.add(request))
            case Abort(request_id, index):
                self._send_events(self._engine.abort(request_id, index))
            case Pause(request_id, is_on):
                self._engine.scheduler.pause(request_id, is_on)
            case CallWorkers(number, name, arguments):
                self._send(self._call_workers(number, name, arguments))
            case CallFeature(number, feature, operation, arguments):
                self._send(self._call_feature(number, feature, operation, arguments))
            case Ping():
                self._pong(message)
            case Shutdown():
                self._stopping = True

    def _pong(self, ping: Ping) -> None:
        if ping.protocol != PROTOCOL:
            self._send(EngineFailed(f"this engine speaks protocol {PROTOCOL}, the client {ping.protocol}"))
            return
        if not self._has_greeted:
            self._has_greeted = True
            self._send(self._ready)
        self._send(Pong(ping.number, self._stats()))

    def _call_workers(self, number: int, name: str, arguments: list[Any]) -> WorkersAnswer:
        try:
            return WorkersAnswer(number, self._engine.call_workers(name, arguments))
        except EngineDead:
            raise
        except FwkError as error:
            return WorkersAnswer(number, error=str(error), is_fault=isinstance(error, PluginFault))

    def _call_feature(self, number: int, feature: str, operation: str, arguments: list[Any]) -> WorkersAnswer:
        self._num_calls += 1
        try:
            return WorkersAnswer(number, [self._engine.call_feature(feature, operation, arguments)])
        except EngineDead:
            raise
        except FwkError as error:
            param, is_fault = getattr(error, "param", None), isinstance(error, PluginFault)
            return WorkersAnswer(number, error=str(error), param=param, is_fault=is_fault)

    def _send_events(self, events: list[TokenEvent]) -> None:
        if events:
            self._send(StepOutputs(events, self._stats()))

    def _stats(self) -> EngineStats:
        stats = self._engine.stats()
        return msgspec.structs.replace(stats, dropped_messages=self._num_dropped) if self._num_dropped else stats

    def _send(self, message: FromEngine) -> None:
        self._socket.send_multipart([self._client, self._encoder.encode(message)])
