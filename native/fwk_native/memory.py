"""Memory of the system's, by its own calls and without torch: huge pages, taken before they are written to."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
from collections.abc import Callable

HUGE = 2 << 20
"""Bytes of a huge page on x86, and on Arm where pages have 4 KiB."""

POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE`` of Linux, which Python's ``mmap`` does not name."""

MAX_PREFAULT_BYTES = 256 << 20
"""What a second takes, where a virtual machine has to get its memory from its host."""


def advise(address: int, size: int, advice: int) -> None:
    """Advise the system of all small pages that the span touches, without the interpreter's lock.

    What the system cannot do, it does not do.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    num_bytes = -(-(address + size - start) // mmap.PAGESIZE) * mmap.PAGESIZE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), ctypes.c_int(advice))


def populate(address: int, size: int) -> None:
    """Take the pages of a span; nothing happens where the system cannot do it ahead (Linux before 5.14)."""
    if sys.platform == "linux":
        advise(address, size, POPULATE_WRITE)


class MemoryPrefaulter:
    """Huge pages that a thread takes while there is nothing to write to them, and gives back once there is.

    A virtual machine whose free memory has gone back to its host gets it from there at 2.5 ms for a MiB where it was
    measured; what was given back to the system a moment ago, it still has.
    """

    def __init__(self, populate: Callable[[int, int], None] = populate) -> None:
        """populate: takes the pages of a span, given its address and its bytes."""
        self._populate = populate
        self.are_wanted = threading.Event()
        self._lock = threading.Lock()  # between one thread that takes and another that gives back
        self._thread: threading.Thread | None = None

    def take(self, num_bytes: int) -> None:
        """Begin to take so many, ``MAX_PREFAULT_BYTES`` at the most."""
        size = min(num_bytes, MAX_PREFAULT_BYTES) // HUGE * HUGE
        if size and hasattr(mmap, "MADV_HUGEPAGE"):
            with self._lock:
                self._thread = threading.Thread(target=self._hold, args=(size,), daemon=True)
                self._thread.start()

    def give_back(self) -> None:
        """Take no more. Waits until the system has back what was taken."""
        self.are_wanted.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _hold(self, size: int) -> None:
        with (
            contextlib.suppress(OSError),  # no room for it: whoever needs memory will say so
            mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory,
        ):
            memory.madvise(mmap.MADV_HUGEPAGE)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            first = -(-address // HUGE) * HUGE
            for page in range(first, first + size, HUGE):
                if self.are_wanted.is_set():
                    return
                self._populate(page, HUGE)
            self.are_wanted.wait()
