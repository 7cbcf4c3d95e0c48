"""What a process does about the one that started it. Executors that start processes of their own use it, too."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading

from fwk_jobs.terminal import ignore_terminal_signals as ignore_terminal_signals
from fwk_jobs.terminal import terminal_signals_blocked as terminal_signals_blocked

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
"""Linux's numbers of requests to prctl, from its headers."""


def continue_with_parent_gone() -> None:
    """On Linux: have the system continue this process, should it be stopped, when its parent dies.

    It then sees that its parent's pipe is closed, and cleans up and ends; one that is not stopped notices nothing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


class Adoption:
    """On Linux: while one is awaited, processes below this one that lose their parent become its children."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_awaited = 0

    def begin(self) -> None:
        self._change(1)

    def end(self) -> None:
        self._change(-1)

    def _change(self, by: int) -> None:
        with self._lock:
            self._num_awaited += by
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(self._num_awaited > 0), 0, 0, 0)


def name_process(name: str) -> None:
    """On Linux: what ``ps`` calls it, in up to 15 bytes; its command line stays."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
