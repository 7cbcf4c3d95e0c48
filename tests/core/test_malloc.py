"""Freed memory goes back to the system, once after each time of work."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from fwk_process import malloc as module
from fwk_process.malloc import REST_SECONDS, Heap


def test_memory_goes_back_once_after_each_time_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[float] = []
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    heap = Heap()
    monkeypatch.setattr(heap, "_trim", lambda pad: trimmed.append(now))
    for work, pause in ((0, 5), (3, 1), (3, 0.9), (4, 0.5), (4, REST_SECONDS), (4, 60), (4, 60), (5, 3), (5, 0)):
        heap.rest(work)
        now += pause
    assert trimmed == [100 + 5 + 1 + 0.9 + 0.5 + REST_SECONDS, now]


def test_the_c_library_has_a_way_to_give_it_back() -> None:
    assert Heap()._trim(0) in (0, 1, None)


GROWTH = """
import ctypes, os, sys, threading
from fwk_process.malloc import Heap, return_large_blocks

def resident():
    Heap().trim()
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def use(num_bytes):
    block = libc.malloc(num_bytes)
    ctypes.memset(block, 1, num_bytes)
    libc.free(block)

def read():
    for megabytes in (30, 24):
        use(megabytes << 20)
    done.set()
    stay.wait()

if sys.argv[1] == "bounded":
    return_large_blocks()
done, stay = threading.Event(), threading.Event()
thread = threading.Thread(target=read)
before = resident()
thread.start()
done.wait()
print((resident() - before) >> 20)
stay.set()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this C library gives memory back in its own way")
def test_a_thread_that_read_a_large_text_keeps_nothing_of_it() -> None:
    """Left alone, glibc keeps the second block: it is at the end of the heap of a thread that lives on."""

    def growth(how: str) -> int:
        command = [sys.executable, "-c", GROWTH, how]
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return int(run.stdout)

    assert growth("bounded") <= 4
    assert growth("left alone") >= 20


LOADING = """
import ctypes, os
from fwk_process.malloc import large_blocks_returned

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def mapped(num_bytes):
    before = open("/proc/self/statm").read().split()[0]
    block = libc.malloc(num_bytes)
    libc.free(block)
    kept = libc.malloc(64)  # above a block of the heap it would keep it
    return int(open("/proc/self/statm").read().split()[0]) - int(before) < num_bytes // 8192

libc.free(libc.malloc(30 << 20))
with large_blocks_returned():
    print(all(mapped(8 << 20) for _ in range(3)))
print(mapped(40 << 20))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's bounds")
def test_a_load_gives_large_blocks_back_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", LOADING], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["True", "True"]
