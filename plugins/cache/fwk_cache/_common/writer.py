"""Copies that wait to be written to a slow store, and the thread that writes them."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

QUEUE_BYTES = 256 * 2**20
"""Copies that wait to be written, at most; what comes on top is not kept."""

PAUSE_SECONDS = 10.0
"""After a failure (a full disk, a server that is down) the store is left alone for so long."""

CLOSE_SECONDS = 1.0

READING, WRITING = "reading from", "writing to"


class Writer:
    """Writes entries in the background by ``write``, whose ``OSError`` begins a pause; the first is logged."""

    def __init__(self, write: Callable[[bytes, memoryview], None], block_bytes: int, place: str, name: str) -> None:
        """place: where K/V are kept, for the log; name: the thread's."""
        self._write = write
        self._place = place
        self.waiting: dict[bytes, bytes] = {}
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._max_waiting = max(1, QUEUE_BYTES // block_bytes)
        self._paused_until = 0.0
        self._has_warned = False
        self._troubles: dict[str, str] = {}  # by what has failed, until it works again
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_paused(self) -> bool:
        return time.monotonic() < self._paused_until

    def put(self, key: bytes, data: memoryview) -> bool:
        """Keep a copy to be written; False when there is no room for it, or in a pause."""
        if len(self.waiting) >= self._max_waiting or self.is_paused:
            return False
        if key not in self.waiting:
            self.waiting[key] = bytes(data)
            self._queue.put(key)
        return True

    @property
    def trouble(self) -> str | None:
        """Why the store is of no use at present."""
        return next(iter(self._troubles.values()), None)

    def works(self, what: str) -> None:
        """Reading or writing has succeeded."""
        if self._troubles:
            self._troubles.pop(what, None)

    def pause(self, error: OSError, what: str) -> None:
        """Leave the store alone for a while, in which reading or writing has failed."""
        self._paused_until = time.monotonic() + PAUSE_SECONDS
        self.warn(error, what)

    def warn(self, error: OSError, what: str) -> None:
        """Log once that entries cannot be kept; ``trouble`` says so until it ``works`` again."""
        self._troubles[what] = f"{what} {self._place} failed: {error.strerror or error}"
        if not self._has_warned:
            self._has_warned = True
            reason = error.strerror or str(error)
            log.warning("K/V cannot be kept in %s, serving continues without: %s", self._place, reason)

    def close(self) -> None:
        """Write the rest, for a second at most."""
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (key := self._queue.get()) is not None:
            try:
                if not self.is_paused:
                    self._write(key, memoryview(self.waiting[key]))
                    self.works(WRITING)
            except OSError as error:
                self.pause(error, WRITING)
            finally:
                del self.waiting[key]
