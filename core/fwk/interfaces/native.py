"""What native operators (C++ functions) are run by, as plugins see it: a worker's threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


class NativeThreads(Protocol):
    """Runs native operators, one after the other. Core's is ``fwk_native.thread_pool.ThreadPool``, one per worker."""

    @property
    def size(self) -> int:
        """Threads that compute an operator."""
        ...

    def run(self, op: int, args: Any, *, is_small: bool = False) -> None:
        """Run one operator, or append it to the step that is being recorded.

        op: its address (``fwk_native.thread_pool.operator``).
        args: a ctypes structure, which the operator only reads. Where it is recorded, what it points at must stay for
            the worker's life. A step is recorded where all that it computes goes through here: an operator of torch in
            between, or other operators for few tokens than for many, has steps computed one by one (/server_info).
        is_small: waking the other threads would take longer than the work.
        """
        ...


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """Some outputs of a linear layer, as a native operator of another plugin computes them.

    operator: the address of one that takes ``Linear`` (``fwk/linear.h``), in a thread of its own too.
    matrix: the address of the matrix to name there. row_bytes: of scratch, for each row of a whole 16.
    first, out_features: which of the layer's outputs these are. bias: [out_features] of theirs, or None.
    kept: what the addresses point into.
    """

    operator: int
    matrix: int
    row_bytes: int
    first: int
    out_features: int
    bias: Any = None
    kept: Any = None


class NoThreads:
    """What a context has that was built without threads: whoever needs none is served, an operator is refused.

    - ``size``: 1.
    """

    size = 1

    def run(self, op: int, args: Any, *, is_small: bool = False) -> None:
        """Raises ``RuntimeError``."""
        raise RuntimeError(
            "this plugin's context has no threads to run native operators: build it with "
            "threads=fwk_native.thread_pool.ThreadPool()"
        )


NO_THREADS = NoThreads()
