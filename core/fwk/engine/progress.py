"""Progress bars of long offline runs."""

from __future__ import annotations

from fwk_process.progress import ProgressBar, is_watched

DELAY = 1.0
"""Seconds a run must take before it shows a bar."""


def offline_bar(what: str, total: int | None, is_wanted: bool | None) -> ProgressBar:
    """A bar over requests, each of which may have several sequences.

    is_wanted: None to show it for more than one, where a person looks on.
    """
    shows = is_watched() and total != 1 if is_wanted is None else is_wanted
    return ProgressBar("", what, total, is_shown=shows, delay=0.0 if is_wanted else DELAY, stays=True)
