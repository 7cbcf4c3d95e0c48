"""The engine's side of the wire: receive, step, send."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import msgspec
import zmq

from fwk.engine.core import Engine
from fwk.errors import InvalidRequest
from fwk.types import (
    Abort,
    AdapterAnswer,
    AdapterInfo,
    AddRequest,
    EngineFailed,
    EngineReady,
    FromEngine,
    LoadAdapter,
    Ping,
    Pong,
    Shutdown,
    StepOutputs,
    ToEngine,
    TokenEvent,
    UnloadAdapter,
)
from fwk.types.messages import PROTOCOL

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 2**20
IDLE_POLL_MS = 500
MESSAGES_PER_STEP = 1000
"""Messages taken in between two steps at most, so that a flood of requests does not stop those under way."""


def bind(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """The engine's socket: clients connect to it and are answered by their identity."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 500)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, 0)  # never drop: the loop's own admission bounds what is in flight
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(address)
    return socket


class EngineLoop:
    """Runs an engine for the clients of a socket until a ``Shutdown`` comes."""

    def __init__(self, engine: Engine, socket: zmq.Socket[bytes], ready: EngineReady) -> None:
        self._engine = engine
        self._socket = socket
        self._ready = ready
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._clients: set[bytes] = set()
        self._owner: dict[str, bytes] = {}  # request -> client
        self._stopping = False
        self.num_dropped_messages = 0

    def run(self) -> None:
        """Receive, step, send; raises what the engine raises."""
        while not self._stopping:
            self._receive()
            if self._engine.has_work:
                self._send_events(self._engine.step())
            else:
                self._engine.check()

    def fail(self, message: str, detail: str) -> None:
        """Tell every client that this engine will answer nothing more; ``detail`` is for its log."""
        for client in self._clients:
            self._send(client, EngineFailed(message, detail))

    def _receive(self) -> None:
        timeout = 0 if self._engine.has_work else IDLE_POLL_MS
        for _ in range(MESSAGES_PER_STEP):
            if not self._socket.poll(timeout):
                return
            timeout = 0
            client, body = self._socket.recv_multipart()[:2]
            try:
                message = self._decoder.decode(body)
            except (msgspec.DecodeError, ValueError) as error:
                self.num_dropped_messages += 1
                log.warning("dropped a message that is not of the protocol: %s", error)
                continue
            self._handle(client, message)
            if self._stopping:
                return

    def _handle(self, client: bytes, message: ToEngine) -> None:
        match message:
            case AddRequest(request):
                self._owner[request.request_id] = client
                self._send_events(self._engine.add(request))
            case Abort(request_id, index):
                self._send_events(self._engine.abort(request_id, index))
            case LoadAdapter(number, name, path):
                self._answer(client, number, lambda: self._engine.adapters.load(name, path))
            case UnloadAdapter(number, name):
                self._answer(client, number, lambda: self._engine.adapters.unload(name))
            case Ping(number, protocol):
                if protocol != PROTOCOL:
                    self._send(client, EngineFailed(f"this engine speaks protocol {PROTOCOL}, the client {protocol}"))
                    return
                if client not in self._clients:
                    self._clients.add(client)
                    self._send(client, self._ready)
                self._send(client, Pong(number, self._engine.stats()))
            case Shutdown():
                self._stopping = True

    def _answer(self, client: bytes, number: int, work: Callable[[], AdapterInfo]) -> None:
        try:
            self._send(client, AdapterAnswer(number, work()))
        except InvalidRequest as error:
            self._send(client, AdapterAnswer(number, error=str(error), param=error.param))

    def _send_events(self, events: Iterable[TokenEvent]) -> None:
        by_client: dict[bytes, list[TokenEvent]] = {}
        for event in events:
            client = self._owner.get(event.request_id)
            if client is not None:
                by_client.setdefault(client, []).append(event)
        for client, own in by_client.items():
            self._send(client, StepOutputs(own, self._engine.stats()))
            for event in own:
                if event.finish_reason is not None and not self._engine.scheduler.knows(event.request_id):
                    self._owner.pop(event.request_id, None)

    def _send(self, client: bytes, message: FromEngine) -> None:
        self._socket.send_multipart([client, self._encoder.encode(message)])
