"""Entries of slow cache tiers, read by a thread while the steps go on."""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

Read = Callable[[bytes, memoryview], bool]

BUFFER_BYTES = 32 * 2**20
"""Entries that were read and not yet kept, at most; one at least."""

CLOSE_SECONDS = 1.0


@dataclass(slots=True)
class _Job:
    keys: Sequence[bytes]
    num_held: int
    """Entries of its path that the fast tier has, or is about to be given."""

    ended: threading.Event = field(default_factory=threading.Event)
    """Set when the job is cancelled, or has read all it could."""


class Prefetcher:
    """Reads entries one after another, and hands them to the thread that owns the tiers when that one asks.

    A job ends at the first entry that no reader has: what is after it is of no use. Until ``end`` its entries count as
    held, and no more are read than the fast tier keeps: those that came last would push out what is used first.
    """

    def __init__(self, readers: Sequence[tuple[str, Read]], block_bytes: int, capacity: int | None = None) -> None:
        """readers: of the slow tiers, fastest first, with the tiers' names; block_bytes: of an entry; capacity: entries
        that the fast tier keeps.
        """
        self._capacity = sys.maxsize if capacity is None else capacity
        self._changed = threading.Condition()
        self._readers = list(readers)
        self._block_bytes = block_bytes
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._open: dict[int, _Job] = {}
        self._arrived: queue.SimpleQueue[tuple[bytes, bytearray]] = queue.SimpleQueue()
        self._room = threading.Semaphore(max(1, BUFFER_BYTES // block_bytes))
        self._is_closing = False
        self._failed: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="fwk-kv-prefetch", daemon=True)
        self._thread.start()

    def start(self, number: int, keys: Sequence[bytes], num_held: int = 0) -> None:
        """Read these, of one path of which the fast tier has ``num_held``, after what was asked for before."""
        job = _Job(keys, num_held)
        with self._changed:
            self._open[number] = job
        self._jobs.put(job)

    def end(self, number: int) -> None:
        """Read no more of a job."""
        with self._changed:
            job = self._open.pop(number, None)
            if job is not None:
                job.ended.set()
            self._changed.notify()

    def take(self, keep: Callable[[bytes, memoryview], None], numbers: Sequence[int] = ()) -> list[bool]:
        """Hand out what has arrived, and tell of each job whether that is all of it."""
        jobs = [self._open.get(number) for number in numbers]
        done = [job is None or job.ended.is_set() for job in jobs]
        while True:
            try:
                key, entry = self._arrived.get_nowait()
            except queue.Empty:
                return done
            keep(key, memoryview(entry))
            self._room.release()

    def close(self) -> None:
        """Read no more; waits a second at most for a read under way."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._room.release()
        self._jobs.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            for key in job.keys:
                if not self._may_hold(job) or not self._fetch(key):
                    break
                job.num_held += 1
            job.ended.set()

    def _may_hold(self, job: _Job) -> bool:
        """Wait until the fast tier has room for one more entry; False: it never will, or the job was cancelled."""
        with self._changed:
            while not (job.ended.is_set() or self._is_closing):
                others = sum(other.num_held for other in self._open.values() if other is not job)
                if others + job.num_held < self._capacity:
                    return True
                if not others:
                    return False
                self._changed.wait()
        return False

    def _fetch(self, key: bytes) -> bool:
        self._room.acquire()
        if self._is_closing:
            return False
        entry = bytearray(self._block_bytes)
        is_read = any(self._read(name, read, key, entry) for name, read in self._readers)
        if is_read:
            self._arrived.put((key, entry))
        else:
            self._room.release()
        return is_read

    def _read(self, name: str, read: Read, key: bytes, entry: bytearray) -> bool:
        try:
            return read(key, memoryview(entry))
        except Exception as error:
            if name not in self._failed:
                self._failed.add(name)
                log.warning("cache tier %s failed to read ahead, serving continues without: %r", name, error)
            return False
