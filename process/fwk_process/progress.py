"""Progress bars on standard error: drawn where a person looks on, and nowhere else.

Each process draws its own, as engines and workers share their parent's terminal; ``set_up_progress`` leaves those of
all but one of several engines or workers out, which would overwrite one another. A line of any process's log clears
the bar, which comes again below it (``fwk_process.log``).
"""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Any

VARIABLE = "TQDM_DISABLE"
"""tqdm's own, so that other libraries' bars and child processes follow."""


def set_up_progress(is_shown: bool) -> None:
    """Draw no bars in this process and those it starts, unless ``is_shown``."""
    if not is_shown:
        os.environ[VARIABLE] = "1"


def is_watched() -> bool:
    """Whether a person looks on, a terminal or a notebook, and wants bars."""
    is_off = os.environ.get(VARIABLE, "").lower() not in ("", "0", "false", "no")
    return not is_off and (sys.stderr.isatty() or "ipykernel" in sys.modules)


DELAY = 1.0
"""Seconds that work on many items must take before a bar is drawn over them."""


class ProgressBar:
    """A bar, or without a total a count; or nothing.

    what: of which there are so many: "prompts", "B" for bytes. is_shown: None for ``is_watched()``. delay: seconds the
    work must take before a bar is drawn. stays: whether it is left on the screen at the end.
    """

    def __init__(
        self,
        title: str,
        what: str,
        total: int | None,
        *,
        is_shown: bool | None = None,
        delay: float = 0.0,
        stays: bool = False,
    ) -> None:
        self._bar: Any = None
        if is_watched() if is_shown is None else is_shown:
            from tqdm.auto import tqdm  # noqa: PLC0415 - only where it is seen

            self._bar = tqdm(
                desc=title or None,
                total=total,
                unit=what if what == "B" else f" {what}",
                unit_scale=what == "B",
                delay=delay,
                dynamic_ncols=not _is_without_size(),
                ncols=80 if _is_without_size() else None,
                nrows=24 if _is_without_size() else None,
                leave=stays,
                disable=False,
            )

    @property
    def is_shown(self) -> bool:
        return self._bar is not None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def add(self, count: int = 1) -> None:
        """So many more are done."""
        if self._bar is not None:
            self._bar.update(count)

    def reach(self, count: int) -> None:
        """So many are done in all."""
        if self._bar is not None:
            self._bar.update(count - self._bar.n)

    def refresh(self) -> None:
        """Draw it again: the time runs while nothing else changes."""
        if self._bar is not None:
            self._bar.refresh()

    def close(self) -> None:
        """Remove it, unless it stays."""
        if self._bar is not None:
            self._bar.close()


def offline_bar(what: str, total: int | None, is_wanted: bool | None) -> ProgressBar:
    """A bar over requests, each of which may have several sequences.

    is_wanted: None to show it for more than one, where a person looks on.
    """
    shows = is_watched() and total != 1 if is_wanted is None else is_wanted
    return ProgressBar("", what, total, is_shown=shows, delay=0.0 if is_wanted else DELAY, stays=True)


def _is_without_size() -> bool:
    """Whether the terminal says it has no columns, as those that programs make may: nothing would be drawn there."""
    try:
        return not os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return False
