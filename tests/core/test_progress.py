"""What a long load says of itself."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from fwk.worker import progress
from fwk.worker.progress import LoadProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHOWN_AFTER", "BAR_EVERY", "LINE_EVERY"):
        monkeypatch.setattr(progress, name, 0.0)


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = LoadProgress(4)
    bar.show(1)
    assert terminal.getvalue() == f"\rpacking weights [{'#' * 10}{' ' * 30}]  25 %"
    bar.show(5)
    assert terminal.getvalue().endswith(f"[{'#' * 40}] 100 %")
    bar.end()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_lines_in_a_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        bar = LoadProgress(4)
        bar.show(3)
        bar.end()
    assert caplog.messages == ["packing weights: 75 %"]


def test_quick_loads_and_unknown_totals_say_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        LoadProgress(0).show(3)
        monkeypatch.setattr(progress, "SHOWN_AFTER", 3600.0)
        LoadProgress(4).show(3)
    assert not caplog.messages
