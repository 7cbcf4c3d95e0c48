"""What a terminal sends (Ctrl-C, a hang-up) goes to all processes in its foreground; the first of them decides."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP)


@contextmanager
def terminal_signals_blocked() -> Iterator[None]:
    """A process started meanwhile gets none of them, during its imports too, until it ignores them (below)."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_terminal_signals() -> None:
    """From now on, and those that were blocked until now."""
    for number in TERMINAL_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # drops one that waits
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINAL_SIGNALS)
