"""Which plugins a process was in when a signal ended it, or while it hung: Python writes the stack to a file."""

from __future__ import annotations

import faulthandler
import re
import signal
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

HANGS = signal.SIGUSR1
"""Sent to a process that hangs, before it is killed: it writes its stack, and continues."""

MAX_CALLS = 8
MAX_BYTES = 1 << 20


def crash_file(address: str) -> Path:
    """Where an engine process writes it, by the address of its socket."""
    return Path(address.removeprefix("ipc://")).with_name("crash")


def record_crashes(path: Path, owners: Iterable[tuple[str, str]]) -> None:
    """Have the stack written to ``path`` on SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT and ``HANGS``.

    owners: where code lies, as the end of a file's path (``acme/kernel.py``) or as a folder (``acme/``), and whose it
    is.
    """
    path.write_text("".join(f"{place}\t{owner}\n" for place, owner in owners))
    file = path.open("a")  # which Python keeps
    faulthandler.enable(file)
    faulthandler.register(HANGS, file)


def crashed_in(path: Path) -> tuple[str, str]:
    """Whose code was on the stack, the innermost first, and its innermost calls; empty, where that is not known."""
    try:
        lines = path.read_bytes()[:MAX_BYTES].decode(errors="replace").splitlines()
    except OSError:
        return "", ""
    owners = dict(line.split("\t") for line in takewhile(lambda line: "\t" in line, lines))
    start = next((i for i, line in enumerate(lines) if line.startswith("Current thread")), len(lines))
    frames = _frames(takewhile(bool, lines[start + 1 :])) or _frames(lines[start + 1 :])  # of threads without Python
    found: dict[str, None] = {}
    for file, _, _ in frames:
        parts = file.split("/")
        places = [*("/".join(parts[i:]) for i in range(len(parts))), *(f"{part}/" for part in parts)]
        found.update(dict.fromkeys([owners[place] for place in places if place in owners][:1]))
    calls = (f"{'/'.join(file.split('/')[-2:])}:{line} {name}" for file, line, name in frames[:MAX_CALLS])
    return ", ".join(found), " < ".join(calls)


def _frames(lines: Iterable[str]) -> list[tuple[str, str, str]]:
    matches = (re.match(r'\s+File "([^"]*)", line (\d+) in (.*)', line) for line in lines)
    return [(one[1], one[2], one[3]) for one in matches if one is not None]
