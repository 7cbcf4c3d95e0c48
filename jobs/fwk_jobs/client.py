"""The caller's side: its thread waits for a job, and any other thread can call it off."""

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
from typing import Protocol

import msgspec

from fwk_jobs.frames import Answer, Cancel, Job, read_frame, write_frame
from fwk_jobs.terminal import terminal_signals_blocked

MAX_WAITING = 24
"""Jobs of a kind that may be under way or wait at once where the caller has no limit; more are refused."""


WARM_UP_CPU_SECONDS = 10.0
WARM_UP_BYTES = 64 * 2**20
"""Of a job that does nothing itself."""


class JobError(Exception):
    """There is no result.

    status: ``refused`` by the job itself (``param`` names a part of what it was given), more ``cpu`` time or ``memory``
    than it may have, ``raised``: the job did, alone with what it was given, ``failed``: the process; ``busy``: too many
    wait; ``closed``.
    """

    def __init__(self, status: str, message: str = "", param: str | None = None) -> None:
        super().__init__(message or status)
        self.status = status
        self.param = param


class Turns(Protocol):
    """Of threads: one that has none does not compute."""

    def acquire(self) -> object: ...

    def release(self) -> object: ...


class Work:
    """What a thread does for one request. Other threads call off the job it waits for, or work while it waits.

    ``turns``: held by a thread of a pool while it computes.
    """

    def __init__(self, turns: Turns) -> None:
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


class JobProcess:
    """Starts the process when it is needed, and again after it has died. Safe to use from any thread.

    ``module`` is run with ``setup``, JSON, as the first line of its input; then ``ForkServer`` answers.
    """

    def __init__(self, module: str, setup: object) -> None:
        self._module = module
        self._setup = msgspec.json.encode(setup) + b"\n"
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()  # held while writing to the process
        self._numbers = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self._calls: dict[int, tuple[str, Future[Answer]]] = {}
        self._is_closed = False
        self._num_deaths = 0  # since an answer has come

    @property
    def trouble(self) -> str | None:
        """That it cannot be had, once it has ended twice without an answer between."""
        return f"{self._module} ends without an answer whenever it is started" if self._num_deaths > 1 else None

    def warm_up(self, kind: str, body: bytes) -> Future[Answer]:
        """Have it import, and prepare such jobs, before a first one waits for that; the answer need not be awaited.

        Raises ``JobError`` after ``close``.
        """
        job = Job(next(self._numbers), kind, body, WARM_UP_CPU_SECONDS, WARM_UP_BYTES, True)
        future: Future[Answer] = Future()
        with self._lock:
            process = self._running()
            self._calls[job.number] = kind, future
        self._send(process, msgspec.msgpack.encode(job))
        return future

    def call(
        self, kind: str, body: bytes, *, cpu_seconds: float, max_bytes: int, max_waiting: int | None = MAX_WAITING
    ) -> bytes:
        """The result of a job; waits for it, with at most so many others of its kind. Raises ``JobError``."""
        work = current_work.get()
        job = Job(next(self._numbers), kind, body, cpu_seconds, max_bytes)
        future: Future[Answer] = Future()
        with self._lock:
            if max_waiting is not None and sum(each == kind for each, _ in self._calls.values()) >= max_waiting:
                raise JobError("busy")
            process = self._running()
            self._calls[job.number] = kind, future
        self._send(process, msgspec.msgpack.encode(job))
        with work.waiting(lambda: self._cancel(job.number)) if work is not None else contextlib.nullcontext():
            answer = future.result()
        if answer.status == "ok":
            return answer.value
        raise JobError(answer.status, answer.value.decode(errors="replace"), answer.param)

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
            raise JobError("closed")
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-P", "-m", self._module]
            environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
            with terminal_signals_blocked():
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0
                )
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.write(self._setup)
            self._process = process
            threading.Thread(target=self._follow, args=(process,), name="fwk-jobs", daemon=True).start()
        return self._process

    def _send(self, process: subprocess.Popen[bytes], frame: bytes) -> None:
        assert process.stdin is not None
        # Not the lock of the thread that reads: the process takes no more while nobody takes its answers. One that has
        # died is noticed by that thread.
        with self._send_lock, contextlib.suppress(OSError, ValueError):
            write_frame(process.stdin.fileno(), frame)

    def _cancel(self, number: int) -> None:
        with self._lock:
            process = self._process if number in self._calls else None
        if process is not None:
            self._send(process, msgspec.msgpack.encode(Cancel(number)))

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        assert process.stdin is not None
        while (frame := read_frame(process.stdout.fileno())) is not None:
            answer = msgspec.msgpack.decode(frame, type=Answer)
            self._num_deaths = 0
            with self._lock:
                call = self._calls.pop(answer.number, None)
            if call is not None:
                call[1].set_result(answer)
        process.wait()
        with self._lock:
            self._num_deaths += 1
            if self._process is process:
                self._process = None
            lost, self._calls = self._calls, {}
            process.stdin.close()
            process.stdout.close()
        for number, (_, future) in lost.items():
            future.set_result(Answer(number, "failed"))
