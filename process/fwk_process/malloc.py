"""Memory that was freed and that the C library keeps for later."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LARGE_BYTES = 1 << 20
"""What is at least as large is mapped by itself, and goes back as soon as it is freed."""
KEPT_BYTES = 4 << 20
"""How much may stay free at the end of each thread's heap, for what comes next."""
MAX_LARGE_BYTES = 32 << 20
"""Up to where glibc raises the first of these by itself; it may keep twice as much."""
REST_SECONDS = 2.0
"""How long nothing must have been done: what comes soon after the last work may want its memory again."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


class Heap:
    """Gives freed memory back to the system, once after each time of work.

    glibc gives back only what lies above everything that is in use. A burst (prompts computed again after pre-emption,
    a grammar compiled) leaves its tens of megabytes behind, in holes that the next burst of another shape does not
    fit into: the process grows with every kind of burst it meets for the first time. ``malloc_trim`` gives back
    every whole page inside the holes too. It takes milliseconds, and the pages cost as much when they are wanted again,
    so it is done when there is nothing else to do. Elsewhere than with glibc, nothing happens.
    """

    def __init__(self) -> None:
        self._trim = _malloc_trim()
        self._seen = 0
        self._since = 0.0
        self._is_due = False

    def rest(self, work: int) -> None:
        """To be called now and then while there is nothing to do; ``work`` is a count of what has been done so far."""
        now = time.monotonic()
        if work != self._seen:
            self._seen, self._since, self._is_due = work, now, True
        elif self._is_due and now - self._since >= REST_SECONDS:
            self._is_due = False
            self.trim()

    def trim(self) -> None:
        """Give back at once what is free."""
        self._trim(0)


def return_large_blocks() -> None:
    """Large blocks go back when they are freed, from this call on, for this process.

    glibc raises both bounds, up to 32 and 64 MiB, whenever a larger block is freed: later ones then come from the heap
    of the thread that asks. The end of a thread's heap is what ``malloc_trim`` does not give back, so one text of
    megabytes could leave 64 MiB behind for each thread that looked at it. To say a bound is to stop it from rising.
    See mallopt(3), and heap_trim in glibc's malloc/arena.c. Elsewhere than with glibc, nothing happens.
    """
    _set_bounds(LARGE_BYTES, KEPT_BYTES)


@contextmanager
def large_blocks_returned() -> Iterator[None]:
    """``return_large_blocks`` meanwhile: what a load needs of a tensor goes back before it reads the next.

    Afterwards the bounds are where glibc's own rule would have taken them: steps use their memory again.
    """
    return_large_blocks()
    try:
        yield
    finally:
        _set_bounds(MAX_LARGE_BYTES, 2 * MAX_LARGE_BYTES)


def _set_bounds(large: int, kept: int) -> None:
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, large)
        mallopt(_M_TRIM_THRESHOLD, kept)


def _malloc_trim() -> Callable[[int], object]:
    with contextlib.suppress(OSError, AttributeError, TypeError):
        return ctypes.CDLL(None).malloc_trim
    return lambda pad: None
