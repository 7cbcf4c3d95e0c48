"""Build several kernels at once, in a process of their own, before they are needed.

``load`` waits for a library that is under way. What fails here is tried again there, which says why.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from fwk_errors import PluginError
from fwk_native import build


def build_ahead(sources: Sequence[Path]) -> subprocess.Popen[bytes] | None:
    """Begin to build those that are not there, for this machine's instruction set. Returns the process that does."""
    missing = [source for source in sources if not _is_there(source)]
    if not missing:
        return None
    missing.sort(key=lambda source: -source.stat().st_size)  # the longest first
    print(f"fwk: building {len(missing)} kernels for this CPU (once, some seconds) ...", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "fwk_native.ahead", *map(str, missing)]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # closed when this process ends, and the builder's group with it
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return None
    threading.Thread(target=_reap, args=(process,), daemon=True, name="kernels").start()
    return process


def _reap(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _is_there(source: Path) -> bool:
    """Also where it cannot be built: whoever needs it says so."""
    try:
        return build.find_library(source) is not None
    except (PluginError, OSError):
        return True


def main(sources: Sequence[str]) -> None:
    """Build them, as many at a time as this process may use cores."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def one(source: str) -> None:
        with suppress(PluginError):
            build.build_library(Path(source))

    with ThreadPoolExecutor(max(1, num_cores)) as pool:
        list(pool.map(one, sources))


def end_with_parent() -> None:
    """And the compilers with this process."""
    os.read(sys.stdin.fileno(), 1)
    os.killpg(0, signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    main(sys.argv[1:])
