"""Where the host waits for the pretended device, by half of a step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest

from fwk.worker.worker import LocalWorker
from tests.helpers.pretend_cuda.tensors import JOURNAL

EXACT: dict[str, Any] = {
    "dtype": "float32",
    "check_blocks": True,
    "attention_backend": "torch",
    "operator_backend": "torch",
    "sampling_backend": "torch",
}
"""Options with which tokens are the CPU's own."""


class Steps:
    """How often the host waited, in each launch and each collected step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.halves: list[tuple[str, int]] = []
        for half in ("launch", "collect"):
            monkeypatch.setattr(LocalWorker, half, self._watched(half, getattr(LocalWorker, half)))

    def _watched(self, half: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def watched(worker: LocalWorker, argument: Any) -> Any:
            before = JOURNAL.syncs.total()
            found = real(worker, argument)
            self.halves.append((half, JOURNAL.syncs.total() - before))
            return found

        return watched

    def waits(self, half: str) -> list[int]:
        return [count for name, count in self.halves if name == half]

    def num_in_flight(self) -> list[int]:
        """How many steps were in flight after each half: two where one was launched before the last was collected."""
        return list(accumulate(1 if half == "launch" else -1 for half, _ in self.halves))


def read_results(patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Break the code: the host reads what a method returns, and waits for it."""
    real = getattr(owner, name)

    def reading(self: Any, *parts: Any) -> Any:
        found = real(self, *parts)
        found.tolist()
        return found

    patch.setattr(owner, name, reading)
