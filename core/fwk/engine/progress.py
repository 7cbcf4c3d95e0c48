"""Progress bars of long offline runs."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

DELAY = 1.0
"""Seconds a run must take before it shows a bar."""


def is_watched() -> bool:
    """Whether a person looks on: a terminal, or a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


class Progress:
    """A bar over requests, each of which may have several sequences; or nothing.

    is_wanted: None to show it for more than one, where a person looks on.
    """

    def __init__(self, what: str, total: int | None, is_wanted: bool | None) -> None:
        self._bar: Any = None
        shows = is_watched() and total != 1 if is_wanted is None else is_wanted
        if shows:
            from tqdm.auto import tqdm  # noqa: PLC0415 - only where it is seen

            self._bar = tqdm(total=total, unit=f" {what}", delay=0.0 if is_wanted else DELAY, dynamic_ncols=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, num_done: int = 1) -> None:
        """So many have ended."""
        if self._bar is not None:
            self._bar.update(num_done)
