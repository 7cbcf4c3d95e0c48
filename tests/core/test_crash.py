"""A process that a signal ends in native code has told in whose."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fwk_process.crash import crash_file, crashed_in

CRASHES = """
import faulthandler, os, signal, sys, threading
sys.path.insert(0, {folder!r})
from pathlib import Path
from fwk_process.crash import record_crashes
from acme import kernel
import other
owners = [("other.py", "plugin 'x.other'"), ("acme/kernel.py", "plugin 'x.kernel'"), ("acme/", "package acme")]
record_crashes(Path({told!r}), owners)
other.call(lambda: kernel.run({action}))
"""
ACTIONS = {
    "SIGSEGV": "faulthandler._sigsegv",
    "SIGABRT": "os.abort",
    "SIGBUS": "lambda: signal.raise_signal(signal.SIGBUS)",
}


HANG = "lambda: (os.kill(os.getpid(), signal.SIGUSR1), os.kill(os.getpid(), signal.SIGKILL))"


@pytest.mark.parametrize("name", [*ACTIONS, "hangs"])
def test_names_who_was_on_the_stack_innermost_first(name: str, tmp_path: Path) -> None:
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme/__init__.py").touch()
    (tmp_path / "acme/kernel.py").write_text("def run(what):\n    what()\n")
    (tmp_path / "other.py").write_text("def call(what):\n    what()\n")
    told = crash_file(f"ipc://{tmp_path}/engine.sock")
    source = CRASHES.format(folder=str(tmp_path), told=str(told), action=ACTIONS.get(name, HANG))
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode < 0, done.stderr
    owners, calls = crashed_in(told)
    assert owners == "plugin 'x.kernel', plugin 'x.other'", told.read_text()
    assert "acme/kernel.py:2 run < " in calls


def test_one_that_says_nothing_names_nobody(tmp_path: Path) -> None:
    assert crashed_in(tmp_path / "crash") == ("", "")
    (tmp_path / "crash").write_bytes(b"a.py\tplugin 'a'\nFatal \xff\n")
    assert crashed_in(tmp_path / "crash") == ("", "")
