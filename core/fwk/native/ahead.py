"""Build several kernels at once, in a process of their own, before they are needed.

``load`` waits for a library that is under way. What fails here is tried again there, which says why.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from fwk.errors import PluginError
from fwk.native import build


def build_ahead(sources: Sequence[Path]) -> subprocess.Popen[bytes] | None:
    """Begin to build those that are not there, for this machine's instruction set. Returns the process that does."""
    missing = [source for source in sources if not _is_there(source)]
    if not missing:
        return None
    missing.sort(key=lambda source: -source.stat().st_size)  # the longest first
    print(f"fwk: building {len(missing)} kernels for this CPU (once, some seconds) ...", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "fwk.native.ahead", *map(str, missing)]
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError:
        return None


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


if __name__ == "__main__":
    main(sys.argv[1:])
