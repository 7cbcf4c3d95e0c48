"""What a pretended device was given to do, what the host waited for, and what went wrong."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from types import FrameType

import torch
from torch import Tensor

POISON = -77
"""In the host's memory until what is copied there arrives."""

_OURS = ("/core/fwk/", "/plugins/")


def here() -> str:
    """The innermost line of ours that is being run."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if any(part in filename for part in _OURS) and not filename.endswith("plugins/answers.py"):  # a guard
            return f"{filename.rpartition('/fwk')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@dataclass(slots=True)
class _Copy:
    """A copy that is under way; it is done when an event from ``number`` on has come."""

    number: int
    host: Tensor
    kept: Tensor  # what the host's memory held, or what it will hold
    to_host: bool
    where: str


@dataclass(slots=True)
class Journal:
    """Counts since ``clear``; what is under way continues."""

    launches: Counter[str] = field(default_factory=Counter[str])
    copies: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])  # (kind, where)
    syncs: Counter[str] = field(default_factory=Counter[str])
    host_bytes: Counter[str] = field(default_factory=Counter[str])
    """That operators on the host have written, by operator; and those that were copied to the device."""
    sent_bytes: int = 0
    faults: list[str] = field(default_factory=list[str])
    """Early overwrites and mixed devices; these are never cleared."""
    _number: int = 0
    _done: int = 0
    _under_way: list[_Copy] = field(default_factory=list[_Copy])

    def clear(self) -> None:
        for counter in (self.launches, self.copies, self.syncs, self.host_bytes):
            counter.clear()
        self.sent_bytes = 0

    def forget(self) -> None:
        """Begin anew, faults and all."""
        self.clear()
        self.faults.clear()
        self._under_way.clear()
        self._done = self._number

    def launch(self, name: str) -> None:
        self._number += 1
        self.launches[name] += 1

    def copy(self, kind: str, host: Tensor | None = None, *, to_host: Tensor | None = None) -> None:
        """A copy; with ``host`` one that the host does not wait for: ``to_host`` arrives there later, or it is read."""
        self._number += 1
        where = here()
        self.copies[kind, where] += 1
        if host is not None:
            self.check()
            kept = host.clone() if to_host is None else to_host.clone()
            self._under_way.append(_Copy(self._number, host, kept, to_host is not None, where))
            if to_host is not None:
                host.fill_(POISON)

    def mark(self) -> int:
        """Where an event recorded now stands."""
        return self._number

    def wait(self, mark: int | None = None) -> None:
        """The host waits for an event, or for everything: a synchronisation, unless it has come already."""
        mark = self._number if mark is None else mark
        if mark <= self._done:
            return
        self.syncs[here()] += 1
        self.check()
        for copy in [copy for copy in self._under_way if copy.number <= mark]:
            self._under_way.remove(copy)
            if copy.to_host:
                with torch.inference_mode():
                    copy.host.copy_(copy.kept)
        self._done = mark

    def check(self) -> None:
        """Note what the host has written to memory that a copy still reads."""
        for copy in self._under_way:
            if not copy.to_host and not torch.equal(copy.host, copy.kept):
                self.faults.append(f"written while a copy from it was under way: {copy.where}")
                copy.kept = copy.host.clone()

    def mixed(self, name: str) -> None:
        self.faults.append(f"{name}: tensors of the host and of the device together at {here()}")

    def of_kind(self, *words: str) -> dict[str, int]:
        """Copies whose kind has all of these words, by place."""
        return {where: n for (kind, where), n in self.copies.items() if set(words) <= set(kind.split())}
