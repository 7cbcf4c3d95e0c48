"""The API process's side of the wire: starts the engine process, talks to it, watches it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from fwk.config import Config
from fwk.config.wire import to_plain
from fwk.engine.process import LaunchSpec
from fwk.errors import EngineDead, InvalidRequest, PluginFault
from fwk.interfaces.engine_pool import Engine, Receiver
from fwk.server.engine_process import EngineProcess
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
    Request,
    Shutdown,
    StepOutputs,
    ToEngine,
    TokenEvent,
    WorkersAnswer,
)
from fwk_process.crash import crash_file, crashed_in
from fwk_process.folders import TemporaryFolder

log = logging.getLogger(__name__)

Numbered = CallWorkers | CallFeature

PING_SECONDS = 0.5
STOP_SECONDS = 3.0
STACK_SECONDS = 0.2
"""For an engine that hangs to note in which plugins."""


class EngineClient(Engine):
    """One engine process and the requests sent to it. Lives on the event loop's thread.

    new_process: of an engine that has begun to import, for ``start``.
    """

    def __init__(
        self,
        config: Config,
        fingerprint: str,
        index: int,
        num_engines: int,
        new_process: Callable[[], EngineProcess],
    ) -> None:
        self._config = config
        self._index = index
        self._num_engines = num_engines
        self._name = "the engine" if num_engines == 1 else f"engine {index}"
        self._fingerprint = fingerprint
        self._receivers: dict[str, Receiver] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._num_asked = 0
        self._num_changing = 0  # calls of features, during which it is silent
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._folder = TemporaryFolder("engine")  # the socket is ours alone
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._socket: zmq.Socket[bytes] | None = None
        self._unsent: list[bytes] = []
        self._new_process = new_process
        self._process: EngineProcess | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: asyncio.Future[EngineReady] | None = None
        self._dead: EngineDead | None = None
        self._last_pong = time.monotonic()
        self._closing = False
        self.stats = EngineStats()
        self.on_stats: Callable[[EngineStats], None] | None = None
        self.on_death: Callable[[], str] | None = None  # says what is done about it

    @property
    def _crash_file(self) -> Path:
        return crash_file(f"{self._folder.path}/engine.sock")

    async def start(self) -> None:
        """Start the process; ``wait_ready`` tells when it serves."""
        address = f"ipc://{self._folder.path}/engine.sock"
        if len(address) > 107:  # the system's limit for socket paths
            raise EngineDead(f"the temporary folder's path is too long for a socket: {self._folder.path}; set TMPDIR")
        self._ready = asyncio.get_running_loop().create_future()
        self._process = self._new_process()
        identity = secrets.token_hex(16)  # told through the pipe alone: no other process can speak for us
        plain, name = to_plain(self._config), self._name.removeprefix("the ")
        self._process.tell(LaunchSpec(address, identity, plain, self._fingerprint, self._index, name))
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self._socket.connect(address)
        self._socket.send(self._encoder.encode(Ping(0)))  # queued: the engine waits for it before it loads
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._receive)
        self._tasks = [asyncio.create_task(self._ping()), asyncio.create_task(self._watch())]

    async def wait_ready(self) -> EngineReady:
        """Raises ``EngineDead`` with the engine's own words when it could not start."""
        assert self._ready is not None
        return await asyncio.shield(self._ready)

    @property
    def pid(self) -> int | None:
        """The engine's process id."""
        return self._process.pid if self._process is not None else None

    @property
    def has_started(self) -> bool:
        """Whether its start has come to an end, good or bad."""
        return self._ready is not None and self._ready.done()

    @property
    def is_dead(self) -> bool:
        return self._dead is not None

    @property
    def is_ready(self) -> bool:
        return self._ready is not None and self._ready.done() and self._dead is None

    @property
    def _silent(self) -> float:
        """Seconds that the engine should have answered in, and has not."""
        return 0.0 if self._num_changing else time.monotonic() - self._last_pong

    def trouble(self) -> str | None:
        """Why the engine cannot serve now: dead, starting, or not answering; None when it can."""
        if self._dead is not None:
            return str(self._dead)
        if not self.is_ready:
            return f"{self._name} is starting"
        silent = self._silent
        if silent > self._config.server.ping_timeout:
            return f"{self._name} has not answered for {silent:.0f} seconds"
        return None

    def submit(self, request: Request, receiver: Receiver) -> None:
        """Send a request; ``receiver`` gets its events, or ``EngineDead`` once."""
        if self._dead is not None:
            raise self._dead
        if not self.is_ready:
            raise EngineDead(f"{self._name} is starting")
        self._receivers[request.request_id] = receiver
        self._send(AddRequest(request))

    def forget(self, request_id: str) -> None:
        """The request has ended; events still on their way are dropped."""
        self._receivers.pop(request_id, None)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Tell the engine to stop working on a request or one of its sequences."""
        if self._dead is None and not self._closing:
            self._send(Abort(request_id, index))

    def pause(self, request_id: str, is_on: bool) -> None:
        """Have the engine keep a request from running, or let it continue."""
        if self._dead is None and not self._closing:
            self._send(Pause(request_id, is_on))

    async def call_workers(self, name: str, arguments: Sequence[Any]) -> list[Any]:
        """Run an operation on the engine's workers; the answers by rank. Raises ``InvalidRequest`` with a refusal.

        Raises ``PluginFault`` where a plugin has failed.
        """
        return await self._ask(CallWorkers(self._next_number(), name, list(arguments)))

    async def call_feature(self, feature: str, operation: str, arguments: Sequence[Any]) -> Any:
        """Run an operation of a feature's part in the engine. Raises ``InvalidRequest`` with a refusal.

        Raises ``PluginFault`` where a plugin has failed. The engine may answer nothing else meanwhile.
        """
        self._num_changing += 1
        try:
            return (await self._ask(CallFeature(self._next_number(), feature, operation, list(arguments))))[0]
        finally:
            self._num_changing -= 1

    def _next_number(self) -> int:
        self._num_asked += 1
        return self._num_asked

    async def _ask(self, message: Numbered) -> Any:
        if self._dead is not None:
            raise self._dead
        if not self.is_ready:
            raise EngineDead("the engine is starting")
        answer = self._answers[message.number] = asyncio.get_running_loop().create_future()
        self._send(message)
        try:
            return await answer
        finally:
            self._answers.pop(message.number, None)

    def _take_answer(self, answer: WorkersAnswer) -> None:
        waiting = self._answers.get(answer.number)
        if waiting is None or waiting.done():
            return
        if answer.error is None:
            waiting.set_result(answer.results)
        elif answer.is_fault:
            waiting.set_exception(PluginFault(answer.error))
        else:
            waiting.set_exception(InvalidRequest(answer.error, answer.param))

    async def close(self) -> None:
        """Stop the engine process: asked first, then killed."""
        if self._closing:
            return
        self._closing = True
        process = self._process
        if process is not None and not process.has_ended:
            if self._socket is not None:
                self._send(Shutdown())
            try:
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
            except TimeoutError:
                process.kill()
                await process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail("the server is stopping")
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close(linger=0)
            self._socket = None
        self._context.destroy(linger=0)
        self._folder.close()

    def _send(self, message: ToEngine) -> None:
        assert self._socket is not None
        self._unsent.append(self._encoder.encode(message))
        if len(self._unsent) == 1:  # all of one turn of the loop go together: each wakes a thread of the socket's
            asyncio.get_running_loop().call_soon(self._send_all)

    def _send_all(self) -> None:
        messages, self._unsent = self._unsent, []
        if self._socket is not None:
            # Never waits: the queue is unbounded, and admission bounds what goes into it.
            self._socket.send_multipart(messages, zmq.NOBLOCK)
            self._receive()  # sending may have taken in what the descriptor would tell

    def _receive(self) -> None:
        """Take in one message, if there is one, and look for the next when others have had their turn.

        The descriptor tells once that something has come, so each look continues until there is nothing. pyzmq's own
        asyncio sockets do the same, by way of futures that cost as much as everything else done with a message.
        """
        if self._socket is None:
            return
        try:
            body = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return
        asyncio.get_running_loop().call_soon(self._receive)
        try:
            message = self._decoder.decode(body)
        except (msgspec.DecodeError, ValueError) as error:
            log.warning("dropped a message that is not of the protocol: %s", error)
            return
        self._take(message)

    def _take(self, message: FromEngine) -> None:
        match message:
            case StepOutputs(events, stats):
                self._last_pong = time.monotonic()  # a loop that sends tokens is not hung
                self._deliver(events)
                self._note(stats)
            case Pong(_, stats):
                self._last_pong = time.monotonic()
                self._note(stats)
            case WorkersAnswer():
                self._last_pong = time.monotonic()
                self._take_answer(message)
            case EngineReady():
                self._last_pong = time.monotonic()
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(message)
            case EngineFailed(text, detail, exit_code):
                self._fail(text if self._num_engines == 1 else f"{self._name}: {text}", detail, exit_code)

    def _note(self, stats: EngineStats) -> None:
        self.stats = stats
        if self.on_stats is not None:
            with contextlib.suppress(PluginFault):  # of a pool: the log has it
                self.on_stats(stats)

    def _deliver(self, events: list[TokenEvent]) -> None:
        by_request: dict[str, list[TokenEvent]] = {}
        for event in events:
            by_request.setdefault(event.request_id, []).append(event)
        for request_id, own in by_request.items():
            receiver = self._receivers.get(request_id)
            if receiver is not None:
                receiver(own)

    async def _ping(self) -> None:
        number = 0
        while self._dead is None:
            self._send(Ping(number))
            number += 1
            await asyncio.sleep(PING_SECONDS)
            silent = self._silent
            if self.is_ready and silent > self._config.server.watchdog_timeout:
                assert self._process is not None
                self._process.write_stack()
                await asyncio.sleep(STACK_SECONDS)
                self._process.kill()  # also ends one that is stopped
                owners, calls = crashed_in(self._crash_file)
                told = f"{self._name} has not answered for {silent:.0f} seconds and was killed"
                self._fail(f"{told}{' in ' if owners else ''}{owners}", calls)

    async def _watch(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        await asyncio.sleep(0.05)  # its last words may still be on the wire
        if not self._closing:
            how = (
                f"was killed by signal {-code} ({signal.Signals(-code).name})"
                if code < 0
                else f"ended with exit code {code}"
            )
            owners, calls = crashed_in(self._crash_file) if code < 0 else ("", "")
            self._fail(f"{self._name} process {how}{' in ' if owners else ''}{owners}", calls)

    def _fail(self, text: str, detail: str = "", exit_code: int | None = None) -> None:
        """The engine is dead: fail every waiting request, once."""
        if self._dead is not None:
            return
        was_ready = self.is_ready
        self._dead = EngineDead(text, exit_code=exit_code)
        if was_ready and not self._closing:
            done = self.on_death() if self.on_death is not None else "nothing is done about it"
            why = f"{text}: {detail}" if detail else text
            name = self._name.removeprefix("the ")
            count = len(self._receivers)
            requests = "1 request" if count == 1 else f"{count} requests"
            fate = "ended with an error" + ("" if self._num_engines == 1 else " or went to another engine")
            log.error("%s dead: %s; %s %s; %s", name, why, requests, fate, done)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(self._dead)
            with contextlib.suppress(EngineDead):
                self._ready.exception()  # retrieved, also when no caller waits any more
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineDead(text))
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            receiver(self._dead)
