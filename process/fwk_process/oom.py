"""Whom the system ends when memory runs out."""

from __future__ import annotations

import contextlib
from pathlib import Path

SCORE = Path("/proc/self/oom_score_adj")

VICTIM = 500
"""Thousandths of the machine's memory that an engine process counts for besides what it has."""


def prefer_as_victim() -> None:
    """On Linux: have the system end this process, and those it starts, before the server that started it.

    An engine that is ended is started again; a server that is ended is not. Needs no privilege: a process may always
    raise its own number. What was set from outside counts, too.
    """
    with contextlib.suppress(OSError, ValueError):
        SCORE.write_text(str(min(1000, int(SCORE.read_text()) + VICTIM)))
