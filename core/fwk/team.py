"""The threads that run native operators, one by one or recorded as a tape.

An operator is a C++ function of the shape that ``fwk/team.h`` describes (``native.load`` finds that header). It is
called with the address of a ctypes structure, which it only reads.
"""

from __future__ import annotations

import ctypes
from functools import cached_property
from pathlib import Path
from typing import Any

from fwk import native

SOURCE = Path(__file__).with_name("team.cpp")


class _Call(ctypes.Structure):
    _fields_ = [("op", ctypes.c_void_p), ("args", ctypes.c_void_p)]


class Tape:
    """Calls of operators in their order. Arguments are kept; what they point at must stay where it is."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, ctypes.Structure]] = []
        self._array: Any = None

    def __len__(self) -> int:
        return len(self._calls)

    def append(self, op: int, args: ctypes.Structure) -> None:
        self._calls.append((op, args))
        self._array = None

    def calls(self) -> Any:
        """The calls as ``team.cpp`` wants them."""
        if self._array is None:
            calls = [_Call(op, ctypes.addressof(args)) for op, args in self._calls]
            self._array = (_Call * len(calls))(*calls)
        return self._array


class Team:
    """One per worker. size: threads; None: as many as torch uses.

    ``tape`` is set while a step is recorded: what is run is then appended to it as well.
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
        self._library.run_one(op, ctypes.addressof(args), 1 if is_small else self.size)

    def replay(self, tape: Tape) -> None:
        """Run the calls of a tape in one parallel region."""
        self._library.run(tape.calls(), len(tape), self.size)

    @cached_property
    def _library(self) -> ctypes.CDLL:
        library = native.load(SOURCE, "plain")
        library.run_one.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
        library.run_one.restype = None
        library.run.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
        library.run.restype = None
        return library


def operator(library: ctypes.CDLL, name: str) -> int:
    """The address of an operator in a library of ``native.load``."""
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None
    return address
