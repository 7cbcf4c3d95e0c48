"""Workers that keep to one NUMA node: its processors, and its memory while there is some.

What ``numactl --cpunodebind=N --preferred=N`` does for a command, done by each worker for itself.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path

from fwk import Options, option
from fwk.errors import ConfigError

NODES = Path("/sys/devices/system/node")
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Number of the system call, which the C library has no function for."""
PREFERRED = 1
"""MPOL_PREFERRED of linux/mempolicy.h: another node's memory only when this one's is full."""


class NumaOptions(Options):
    """Options of devices whose workers can keep to NUMA nodes."""

    numa_node: tuple[int, ...] = option(
        (),
        "The NUMA node that each of this machine's workers keeps to, in the order of replicas and, in each, of ranks: "
        "its processors, and its memory as long as some is free. By default the operating system decides. Linux only.",
        stability="beta",
    )


def keep_to_node(options: NumaOptions | None, index: int) -> int | None:
    """Keep the calling thread, and those that it starts, to the node of worker ``index``.

    Returns how many processors it has there; None where nothing was asked for. Raises ``ConfigError`` for a node that
    is not there, or has no processor that this process may use.
    """
    if options is None or not options.numa_node:
        return None
    if index >= len(options.numa_node):
        raise ConfigError(
            f"--numa-node names nodes of {len(options.numa_node)} workers, and this run has at least {index + 1}: name "
            "one for each rank of each replica"
        )
    node = options.numa_node[index]
    if not sys.platform.startswith("linux") or platform.machine() not in SET_MEMPOLICY:
        raise ConfigError(f"--numa-node: workers are placed on Linux, on {' and '.join(SET_MEMPOLICY)}, only")
    try:
        listed = processors((NODES / f"node{node}" / "cpulist").read_text())
    except OSError:
        there = sorted(int(path.name[4:]) for path in NODES.glob("node[0-9]*"))
        raise ConfigError(f"--numa-node {node}: this machine has {', '.join(map(str, there)) or 'none'}") from None
    usable = listed & os.sched_getaffinity(0)
    if not usable:
        raise ConfigError(f"--numa-node {node}: this process may use none of the node's processors")
    os.sched_setaffinity(0, usable)
    _prefer_memory_of(node)
    return len(usable)


def processors(listed: str) -> set[int]:
    """The numbers of a list such as ``0-3,8``."""
    found: set[int] = set()
    for part in listed.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found


def _prefer_memory_of(node: int) -> None:
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    call = ctypes.CDLL(None, use_errno=True).syscall
    # The kernel reads one bit less than this length.
    if call(SET_MEMPOLICY[platform.machine()], PREFERRED, mask, len(mask) * bits + 1) != 0:
        why = os.strerror(ctypes.get_errno())
        raise ConfigError(f"--numa-node {node}: the operating system does not place memory for this process: {why}")
