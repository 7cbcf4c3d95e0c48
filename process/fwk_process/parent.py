"""What a process does about the one that started it. Executors that start processes of their own use it, too."""

from __future__ import annotations

import ctypes
import signal
import sys

from fwk_jobs.terminal import ignore_terminal_signals as ignore_terminal_signals
from fwk_jobs.terminal import terminal_signals_blocked as terminal_signals_blocked

PR_SET_PDEATHSIG = 1
"""Linux's number of the request to prctl, from its headers."""


def continue_with_parent_gone() -> None:
    """On Linux: have the system continue this process, should it be stopped, when its parent dies.

    It then sees that its parent's pipe is closed, and cleans up and ends; one that is not stopped notices nothing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
