"""The process's side: runs each job in a fork of itself, within limits.

A fork costs a millisecond, starts with everything that was built before it, and takes what it allocated with it when
it ends. The system ends one that exceeds its CPU time, whatever native code it is in. There are no threads here, so
forking is safe.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from fwk_jobs.frames import Answer, Cancel, Job, read_frame, write_frame

MAX_RUNNING = 2
"""Jobs at once; a slow one does not hold up the next."""

WALL_FACTOR = 10.0
"""A job that sleeps instead of computing ends after so many times its CPU time."""

Prepare = Callable[[Job], None]
Run = Callable[[Job], bytes]

_decode = msgspec.msgpack.Decoder(Job | Cancel).decode


class ForkServer:
    """Reads jobs from ``source`` and writes answers to ``target`` (descriptors) until ``source`` is closed.

    ``prepare`` is called in this process before a job's fork: what it builds is there for all later jobs. ``run`` is
    called in the fork. Both refuse a job by raising ``refusal``, whose ``param``, if it has one, is passed on.
    """

    def __init__(self, source: int, target: int, prepare: Prepare, run: Run, refusal: type[Exception]) -> None:
        self._refusal = refusal
        self._source = source
        self._target = target
        self._prepare = prepare
        self._run_job = run
        self._waiting: deque[Job] = deque()
        self._running: dict[int, tuple[Job, int]] = {}  # the descriptor of the answer: the job, its process
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        self._selector.register(self._source, selectors.EVENT_READ)
        while True:
            while self._waiting and len(self._running) < MAX_RUNNING:
                self._start(self._waiting.popleft())
            for key, _ in self._selector.select():
                if key.fd != self._source:
                    self._finish(key.fd)
                elif not self._take():
                    for _, pid in self._running.values():
                        os.kill(pid, signal.SIGKILL)
                    return

    def _take(self) -> bool:
        frame = read_frame(self._source)
        if frame is None:
            return False
        message = _decode(frame)
        if isinstance(message, Job):
            self._waiting.append(message)
            return True
        for job, pid in self._running.values():
            if job.number == message.number:
                os.kill(pid, signal.SIGKILL)
        for job in [job for job in self._waiting if job.number == message.number]:
            self._waiting.remove(job)
            self._answer(Answer(job.number, "failed"))
        return True

    def _start(self, job: Job) -> None:
        try:
            self._prepare(job)
        except self._refusal as error:
            self._answer(_refused(job, error))
            return
        except Exception as error:
            self._answer(Answer(job.number, "failed", f"{type(error).__name__}: {error}".encode()))
            return
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            os.close(self._source)
            self._be_job(job, writing)
        os.close(writing)
        self._running[reading] = (job, pid)
        self._selector.register(reading, selectors.EVENT_READ)

    def _be_job(self, job: Job, target: int) -> None:
        """The fork: run, answer, end. Never returns."""
        code = 1
        try:
            before = _data_bytes()
            limit = before + job.max_bytes
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.setitimer(signal.ITIMER_REAL, WALL_FACTOR * job.cpu_seconds)
            signal.setitimer(signal.ITIMER_PROF, job.cpu_seconds)  # the default action of both signals is to end it
            try:
                answer = Answer(job.number, "ok", self._run_job(job))
            except self._refusal as error:
                answer = _refused(job, error)
            except MemoryError:
                answer = Answer(job.number, "memory")
            write_frame(target, msgspec.msgpack.encode(answer))
            code = 0
        except BaseException as error:
            with contextlib.suppress(BaseException):
                write_frame(
                    target,
                    msgspec.msgpack.encode(
                        Answer(job.number, "raised", f"{type(error).__name__}: {error}"[:300].encode())
                    ),
                )
        finally:
            os._exit(code)

    def _finish(self, descriptor: int) -> None:
        """A job's pipe has something, or its process has ended."""
        job, pid = self._running.pop(descriptor)
        self._selector.unregister(descriptor)
        frame = read_frame(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        if frame is not None:
            write_frame(self._target, frame)
            return
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if number in (signal.SIGPROF, signal.SIGALRM):
            self._answer(Answer(job.number, "cpu"))
        else:
            if number == signal.SIGABRT:  # native code that gets no memory, which has said so in words of its own
                print(
                    f"a job of kind {job.kind!r} was ended at its limit of {job.max_bytes >> 20} MiB: a line above "
                    "that an allocation failed is that job's, not the server's",
                    file=sys.stderr,
                    flush=True,
                )
            self._answer(Answer(job.number, "memory" if number in (signal.SIGABRT, signal.SIGKILL) else "failed"))

    def _answer(self, answer: Answer) -> None:
        write_frame(self._target, msgspec.msgpack.encode(answer))


def _refused(job: Job, error: Exception) -> Answer:
    return Answer(job.number, "refused", str(error).encode(), getattr(error, "param", None))


def _data_bytes() -> int:
    """Private writable memory of this process, as RLIMIT_DATA counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0
