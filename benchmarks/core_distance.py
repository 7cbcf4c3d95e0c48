"""How far apart two cores are: how long a line of memory takes from one to the other and back.

    python -m benchmarks.core_distance [--seconds 10]

On a virtual machine that changes from second to second, as its host moves its cores: on one with Zen 4 between some
50 ns (they share a cache) and 300 (they do not). Threads that write for one another are slower by that, and figures of
such seconds are not to be compared with others.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import time
from pathlib import Path

import fwk_native as native

SOURCE = Path(__file__).with_suffix(".cpp")

FAR = 120e-9
"""Seconds there and back from which cores are called far apart."""


def distance() -> float:
    """Seconds there and back between the first two cores of this process, 0 of one or of a system that does not let
    threads choose; takes a millisecond."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        return 0.0
    library = native.load(SOURCE, "plain")
    library.core_distance.restype = ctypes.c_double
    return library.core_distance(*cores[:2])


def name_of(before: float, after: float) -> str:
    """Where cores were between two measurements: near, far, or moved."""
    if (before < FAR) != (after < FAR):
        return "moved"
    return "near" if before < FAR else "far"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10)
    found: list[float] = []
    end = time.monotonic() + parser.parse_args().seconds
    while time.monotonic() < end:
        found.append(distance() * 1e9)
        print(f"{found[-1]:.0f}", end=" ", flush=True)
        time.sleep(0.2)
    far = sum(x >= FAR * 1e9 for x in found) / len(found)
    spread = f"{statistics.median(found):.0f} ns ({min(found):.0f} to {max(found):.0f})"
    print(f"\nmedian {spread}, far apart {far:.0%} of the time")


if __name__ == "__main__":
    main()
