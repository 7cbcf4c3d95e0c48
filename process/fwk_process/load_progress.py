"""How far a long load has come: a bar on a terminal, lines in a log."""

from __future__ import annotations

import logging
import time

from fwk_process.progress import ProgressBar, is_watched

log = logging.getLogger(__name__)

SHOWN_AFTER = 2.0
"""Seconds: loads that take less say nothing."""

LINE_EVERY = 5.0


class LoadProgress:
    """Told of every tensor that is read. total: of the checkpoint; 0 where it is not known, and nothing is shown."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._next = time.monotonic() + SHOWN_AFTER
        self._bar: ProgressBar | None = None

    def show(self, count: int) -> None:
        """``count`` tensors were read."""
        if self._bar is not None:
            self._bar.reach(min(count, self._total))
            return
        now = time.monotonic()
        if not self._total or now < self._next:
            return
        if is_watched():
            self._bar = ProgressBar("loading weights", "tensors", self._total)
            self._bar.reach(min(count, self._total))
            return
        self._next = now + LINE_EVERY
        log.info("loading weights: %.0f %%", 100 * min(count / self._total, 1.0))

    def end(self) -> None:
        """Everything was read: remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._total = 0  # what is read later is no start
