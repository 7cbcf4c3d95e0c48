"""How far a long load has come: a bar on a terminal, lines in a log."""

from __future__ import annotations

import logging
import sys
import time

log = logging.getLogger(__name__)

SHOWN_AFTER = 2.0
"""Seconds: loads that take less say nothing."""

BAR_EVERY, LINE_EVERY = 0.1, 5.0
WIDTH = 40


class LoadProgress:
    """Told of every tensor that is read. total: of the checkpoint; 0 where it is not known, and nothing is shown."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._is_terminal = sys.stderr.isatty()
        self._next = time.monotonic() + SHOWN_AFTER
        self._has_bar = False

    def show(self, count: int) -> None:
        """``count`` tensors were read."""
        now = time.monotonic()
        if not self._total or now < self._next:
            return
        part = min(count / self._total, 1.0)
        self._next = now + (BAR_EVERY if self._is_terminal else LINE_EVERY)
        if not self._is_terminal:
            log.info("packing weights: %.0f %%", 100 * part)
            return
        self._has_bar = True
        filled = int(WIDTH * part)
        sys.stderr.write(f"\rpacking weights [{'#' * filled}{' ' * (WIDTH - filled)}] {100 * part:3.0f} %")
        sys.stderr.flush()

    def end(self) -> None:
        """Everything was read: remove the bar."""
        if self._has_bar:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._has_bar = False
