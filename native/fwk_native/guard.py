"""Runs a command, and ends it with all that it started once the other end of a pipe is closed.

``python guard.py DESCRIPTOR COMMAND...``, in a session of its own. However the process ends that holds the other end,
SIGKILL included, no compiler outlives it. Imports the standard library alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence


def main(descriptor: int, command: Sequence[str]) -> int:
    """The command's exit code; 127 when it cannot be started."""
    threading.Thread(target=_follow, args=(descriptor,), daemon=True).start()
    try:
        return subprocess.call(command)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 127


def _follow(descriptor: int) -> None:
    os.read(descriptor, 1)
    os.killpg(0, signal.SIGTERM)  # on which compilers remove their temporary files


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
