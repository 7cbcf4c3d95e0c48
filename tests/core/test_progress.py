"""Progress bars: drawn on a terminal, never elsewhere, and not where they are turned off."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import struct
import sys
import termios
from pathlib import Path

import pytest

from fwk_native import build, compiler
from fwk_process import load_progress as progress
from fwk_process.load_progress import LoadProgress
from fwk_process.log import ClearingHandler
from fwk_process.progress import VARIABLE, ProgressBar, is_watched, offline_bar, set_up_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error from now on. Not a fixture: pytest sets standard error anew for each phase of a test."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    for name in ("SHOWN_AFTER", "LINE_EVERY"):
        monkeypatch.setattr(progress, name, 0.0)


def test_a_load_on_a_terminal(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    terminal = a_terminal(monkeypatch)
    bar = LoadProgress(4)
    bar.show(1)
    bar.show(5)
    assert bar._bar is not None
    bar._bar.refresh()  # otherwise it is drawn again after a while
    assert "loading weights: 100%" in terminal.getvalue().rpartition("\r")[2]
    assert "4/4" in terminal.getvalue()
    bar.end()
    assert not terminal.getvalue().rpartition("\r")[2].strip(), "it is removed"
    bar.show(5)
    assert not terminal.getvalue().rpartition("\r")[2].strip(), "and stays away"
    assert not caplog.messages


def test_lines_in_a_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        bar = LoadProgress(4)
        bar.show(3)
        bar.end()
    assert caplog.messages == ["loading weights: 75 %"]


def test_quick_loads_and_unknown_totals_say_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        LoadProgress(0).show(3)
        monkeypatch.setattr(progress, "SHOWN_AFTER", 3600.0)
        LoadProgress(4).show(3)
    assert not caplog.messages


def test_bars_are_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    assert is_watched()
    monkeypatch.setenv(VARIABLE, "0")
    set_up_progress(True)
    assert is_watched(), "0 turns nothing off"
    set_up_progress(False)
    assert os.environ[VARIABLE] == "1", "processes that are started hear of it"
    assert not is_watched()
    with ProgressBar("fetching", "B", 100) as bar, offline_bar("prompts", 5, None) as other:
        bar.add(50)
        other.add()
    assert terminal.getvalue() == ""


def test_nothing_is_drawn_into_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("fetching", "B", 100) as bar, offline_bar("prompts", 5, None) as other:
        bar.reach(50)
        other.add()
        bar.refresh()
    assert capsys.readouterr().err == ""


def test_a_line_of_the_log_clears_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    handler = ClearingHandler(terminal)
    with ProgressBar("fetching", "B", 100) as bar:
        bar.reach(50)
        handler.handle(logging.LogRecord("x", logging.INFO, "", 0, "a line", None, None))
        before, _, after = terminal.getvalue().rpartition("a line\n")
        assert before.rpartition("\r")[2] == "\x1b[K", "the line begins on an empty one"
        assert "50%" in after, "and the bar comes again"


def test_a_line_of_the_log_clears_another_processes_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "a line", None, None)
    terminal = a_terminal(monkeypatch)
    ClearingHandler(terminal).handle(record)
    assert terminal.getvalue() == "\r\x1b[Ka line\n"
    file = io.StringIO()
    ClearingHandler(file).handle(record)
    assert file.getvalue() == "a line\n"


def test_a_terminal_that_says_it_has_no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = pty.openpty()
    with open(ours, "w") as stream, open(theirs, "rb", buffering=0) as screen:
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
        monkeypatch.setattr(sys, "stderr", stream)
        with ProgressBar("fetching", "B", 100) as bar:
            bar.refresh()
        assert b"fetching" in screen.read(1000)


def test_a_build_on_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    terminal = a_terminal(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "BAR_EVERY", 0.01)
    source = tmp_path / "sample.cpp"
    source.write_text('extern "C" int sample() { return 7; }')
    if compiler.find() is None:
        pytest.skip("no C++ compiler")
    assert build.load(source).sample() == 7
    drawn = terminal.getvalue()
    assert "building the kernel sample" in drawn
    assert "..." not in drawn, "a bar, no line"
    assert "1/2" in drawn, "compiled, then linked"
    assert not drawn.rpartition("\r")[2].strip(), "it is removed"
