"""How much memory this process may take: of the machine, of its control group (a container's), of its own rlimits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
PROC = Path("/proc/self")

NO_LIMIT = 2**60
"""Bytes from which a number is none: version 1 of control groups has no other word for it."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One bound. source: as an operator knows it. used: bytes that count towards it and cannot be had back."""

    source: str
    num_bytes: int
    used: int

    @property
    def left(self) -> int:
        return max(0, self.num_bytes - self.used)


def memory_limits() -> list[MemoryLimit]:
    """All bounds that are set, besides the machine's size; none on systems without them."""
    return [*_cgroup_limits(), *_rlimits()]


def available_memory() -> int:
    """Bytes that this process may still take: of the machine, or of the least that a limit leaves."""
    return min([psutil.virtual_memory().available, *(limit.left for limit in memory_limits())])


def memory_in_words() -> str:
    """For the log at start."""
    machine = psutil.virtual_memory()
    limits = [f"{limit.source} {_gib(limit.num_bytes)} ({_gib(limit.left)} left)" for limit in memory_limits()]
    bounds = f"limits: {', '.join(limits)}" if limits else "no limit by a control group or rlimit"
    return f"memory: {_gib(machine.total)}, of which {_gib(machine.available)} are free; {bounds}"


def _cgroup_limits() -> Iterator[MemoryLimit]:
    """Of this process's control group and those above it, of version 2 and of version 1."""
    try:
        lines = (PROC / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if not controllers:
            for folder in _upwards(CGROUP, place):
                for name in ("memory.max", "memory.high"):  # above this one the group is slowed down
                    yield from _limit(f"cgroup v2 {name}", folder, name, "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            for folder in _upwards(CGROUP / "memory", place):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                yield from _limit("cgroup v1 memory.limit_in_bytes", folder, *names)


def _upwards(root: Path, place: str) -> Iterator[Path]:
    """The group's folder and those above it. In a container they may be missing: its root is the container's group."""
    folder = root / place.lstrip("/")
    while folder != root and ".." not in folder.parts:
        yield folder
        folder = folder.parent
    yield root


def _limit(source: str, folder: Path, limit: str, usage: str, reclaimable: str) -> Iterator[MemoryLimit]:
    try:
        word = (folder / limit).read_text().strip()
        used = int((folder / usage).read_text())
        stat = (folder / "memory.stat").read_text()
    except (OSError, ValueError):
        return
    if word == "max" or int(word) >= NO_LIMIT:
        return
    cached = sum(int(line.split()[1]) for line in stat.splitlines() if line.startswith(f"{reclaimable} "))
    yield MemoryLimit(source, int(word), used - cached)


def _rlimits() -> Iterator[MemoryLimit]:
    with contextlib.suppress(ImportError):  # not on every platform
        import resource  # noqa: PLC0415

        for name, field in (("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")):
            soft, _ = resource.getrlimit(getattr(resource, name))
            if soft != resource.RLIM_INFINITY:
                yield MemoryLimit(name, soft, _status(field))


def _status(field: str) -> int:
    """Bytes of a field of /proc/self/status; 0 where there is none."""
    with contextlib.suppress(OSError):
        for line in (PROC / "status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return 0


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
