"""How the threads of a CPU's kernels wait for each other."""

from __future__ import annotations

from collections.abc import MutableMapping

SPIN_COUNT = "3000"
"""Turns a thread waits by spinning before it sleeps (GNU OpenMP's ``GOMP_SPINCOUNT``).

The library's own 300,000 turns are about a millisecond. When anything else runs on the same cores (the API process is
enough), a step has hundreds of waits of that length, each burning the time slice of the thread that is waited for:
measured on 2 cores beside one busy process, a decode step of 22 ms took 470 to 1050. With 3,000 turns it takes 90, and
on a quiet machine it is as fast as before; with 1,000, threads fall asleep between operators (27 instead of 22 ms).
"""


def settle_waiting(environment: MutableMapping[str, str]) -> None:
    """Set the variables before torch is imported; a user's own choice stands."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
