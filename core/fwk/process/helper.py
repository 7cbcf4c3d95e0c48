"""Work that may turn out endless or huge, done in a process that can be killed.

``Helper`` starts a process that imports and builds once (``fwk.process.fork_server``) and forks for each job. The
caller's thread waits; it can be called off from any other.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Literal

import msgspec

from fwk.errors import InvalidRequest, NotServed, RequestFailed

MAX_WAITING = 24
"""Jobs that may be under way or wait at once; more are refused, to be tried again."""

MAX_FRAME = 256 * 2**20

Status = Literal["ok", "invalid", "cpu", "memory", "failed"]


class Job(msgspec.Struct, tag=True, frozen=True):
    """One piece of work. ``max_bytes``: what it may allocate beyond what the process had before."""

    number: int
    kind: str
    body: bytes
    cpu_seconds: float
    max_bytes: int


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """Nobody waits for a job any more."""

    number: int


class Answer(msgspec.Struct, frozen=True):
    """What became of a job: its result, or what to tell the client."""

    number: int
    status: Status
    value: bytes = b""
    param: str | None = None


class Work:
    """What a thread does for one request. Other threads call off the job it waits for, or work while it waits.

    ``turns``: held by a thread of a pool while it computes.
    """

    def __init__(self, turns: threading.Semaphore) -> None:
        self._turns = turns
        self._lock = threading.Lock()
        self._action: Callable[[], None] | None = None
        self.is_set = False

    @contextlib.contextmanager
    def waiting(self, cancel: Callable[[], None]) -> Iterator[None]:
        """Let another thread have this one's turn; ``cancel`` is called when nobody wants the result any more."""
        self._on_cancel(cancel)
        self._turns.release()
        try:
            yield
        finally:
            self._turns.acquire()
            self._on_cancel(None)

    def _on_cancel(self, action: Callable[[], None] | None) -> None:
        with self._lock:
            self._action = action
            if self.is_set and action is not None:
                action()

    def cancel(self) -> None:
        with self._lock:
            self.is_set = True
            if self._action is not None:
                self._action()


current_work: ContextVar[Work | None] = ContextVar("current_work", default=None)
"""That of this thread, in a pool that shares turns."""


class Helper:
    """Starts the process when it is needed, and again after it has died. Safe to use from any thread.

    ``module`` is run with ``setup``, JSON, as the first line of its input; then ``ForkServer`` answers.
    """

    def __init__(self, module: str, setup: object) -> None:
        self._module = module
        self._setup = msgspec.json.encode(setup) + b"\n"
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self._calls: dict[int, Future[Answer]] = {}
        self._is_closed = False

    def start(self) -> None:
        """Have it import and build before a first job waits for that."""
        with self._lock:
            self._running()

    def call(self, kind: str, body: bytes, *, cpu_seconds: float, max_bytes: int, what: str) -> bytes:
        """The result of a job; waits for it.

        ``what`` names the client's part of it ("the grammar"). Raises ``InvalidRequest`` for one that exceeds its
        limits, ``NotServed`` when too many wait.
        """
        work = current_work.get()
        job = Job(next(self._numbers), kind, body, cpu_seconds, max_bytes)
        future: Future[Answer] = Future()
        with self._lock:
            if len(self._calls) >= MAX_WAITING:
                raise NotServed(f"too many requests wait for {what} of others to be checked", 503, 1)
            process = self._running()
            self._calls[job.number] = future
            self._send(process, msgspec.msgpack.encode(job))
        with work.waiting(lambda: self._cancel(job.number)) if work is not None else contextlib.nullcontext():
            answer = future.result()
        match answer.status:
            case "ok":
                return answer.value
            case "invalid":
                raise InvalidRequest(answer.value.decode(), answer.param)
            case "cpu":
                raise InvalidRequest(f"{what} takes more than {cpu_seconds:g} seconds of CPU time")
            case "memory":
                raise InvalidRequest(f"{what} takes more than {max_bytes >> 20} MB of memory")
            case "failed":
                raise RequestFailed(f"{what} could not be checked")

    def close(self) -> None:
        """End it; calls under way fail."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()  # before the lock: a thread that holds it may be writing to a process that is busy
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._is_closed:
            raise NotServed("the server is stopping", 503)
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-P", "-m", self._module]
            environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0
            )
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.write(self._setup)
            self._process = process
            threading.Thread(target=self._follow, args=(process,), name="fwk-helper", daemon=True).start()
        return self._process

    def _send(self, process: subprocess.Popen[bytes], frame: bytes) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # one that has died is noticed by the thread that reads
            write_frame(process.stdin.fileno(), frame)

    def _cancel(self, number: int) -> None:
        with self._lock:
            if number in self._calls and self._process is not None:
                self._send(self._process, msgspec.msgpack.encode(Cancel(number)))

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        assert process.stdin is not None
        while (frame := read_frame(process.stdout.fileno())) is not None:
            answer = msgspec.msgpack.decode(frame, type=Answer)
            with self._lock:
                future = self._calls.pop(answer.number, None)
            if future is not None:
                future.set_result(answer)
        process.wait()
        with self._lock:
            if self._process is process:
                self._process = None
            lost, self._calls = self._calls, {}
            process.stdin.close()
            process.stdout.close()
        for number, future in lost.items():
            future.set_result(Answer(number, "failed"))


def write_frame(descriptor: int, body: bytes) -> None:
    """A message and, before it, its length."""
    data = memoryview(len(body).to_bytes(4, "little") + body)
    while data:
        data = data[os.write(descriptor, data) :]


def read_frame(descriptor: int) -> bytes | None:
    """The next message; None at the end, also in the middle of one."""
    head = _read(descriptor, 4)
    size = int.from_bytes(head or b"", "little")
    return None if head is None or size > MAX_FRAME else _read(descriptor, size)


def _read(descriptor: int, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = os.read(descriptor, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
