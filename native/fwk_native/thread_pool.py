"""The threads that run native operators, one by one or recorded as a tape.

An operator is a C++ function of the shape that ``fwk/thread_pool.h`` describes (``native.load`` finds that header).
It is called with the address of a ctypes structure, which it only reads.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cached_property
from pathlib import Path
from typing import Any

from fwk_native.build import load

SOURCE = Path(__file__).with_name("thread_pool.cpp")


class _Call(ctypes.Structure):
    _fields_ = [("op", ctypes.c_void_p), ("args", ctypes.c_void_p)]


class Tape:
    """Calls of operators in their order. Arguments are kept; what they point at must stay where it is."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ctypes.Structure]] = []
        self._array: Any = None

    def __len__(self) -> int:
        return len(self.calls)

    def append(self, op: int, args: ctypes.Structure) -> None:
        self.calls.append((op, args))
        self._array = None

    def array(self) -> Any:
        """The calls as ``thread_pool.cpp`` wants them."""
        if self._array is None:
            calls = [_Call(op, ctypes.addressof(args)) for op, args in self.calls]
            self._array = (_Call * len(calls))(*calls)
        return self._array


class ThreadPool:
    """One per worker. size: threads, the caller's included; None: as many as torch uses.

    The threads are started by the first operator that needs them, sleep while there is none, and end with the pool.
    ``tape`` is set while a step is recorded: what would be run is then appended to it instead.
    """

    def __init__(self, size: int | None = None) -> None:
        self._size = size
        self.tape: Tape | None = None

    @property
    def size(self) -> int:
        """Threads that compute an operator."""
        if self._size is not None:
            return self._size
        import torch  # noqa: PLC0415 - declarations import this module, and are light

        return torch.get_num_threads()

    def run(self, op: int, args: ctypes.Structure, *, is_small: bool = False) -> None:
        """Run one operator: ``op`` is its address (``operator``).

        is_small: waking the other threads would take longer than the work.
        """
        if self.tape is not None:
            self.tape.append(op, args)
            return
        self._library.pool_run_one(self._pool, op, ctypes.addressof(args), 1 if is_small else self.size)

    def replay(self, tape: Tape) -> None:
        """Run the calls of a tape in one region."""
        self._library.pool_run(self._pool, tape.array(), len(tape), self.size)

    @cached_property
    def _library(self) -> ctypes.CDLL:
        library = load(SOURCE, "plain")
        library.pool_new.restype = ctypes.c_void_p
        library.pool_close.argtypes = (ctypes.c_void_p,)
        library.pool_run_one.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
        library.pool_run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
        for name in ("pool_close", "pool_run_one", "pool_run"):
            getattr(library, name).restype = None
        return library

    @cached_property
    def _pool(self) -> int:
        pool = self._library.pool_new()
        weakref.finalize(self, self._library.pool_close, pool)
        return pool


def operator(library: ctypes.CDLL, name: str) -> int:
    """The address of an operator in a library of ``native.load``."""
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None
    return address
