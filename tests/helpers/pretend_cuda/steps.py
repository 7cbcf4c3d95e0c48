"""Where the host waits for the pretended device, by half of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

import fwk
from fwk import SamplingParams
from fwk.worker.worker import LocalWorker
from tests.helpers.pretend_cuda.device import pretended
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

    def assert_one_wait(self, reads_drafts: bool = False) -> None:
        """No launch waited, a collected step once, and nothing was copied as a device would not have it.

        reads_drafts: the host must know drafts before they are verified, and so waits for each.
        """
        assert JOURNAL.faults == []
        assert max(self.waits("launch")) == 0, dict(JOURNAL.syncs)
        assert JOURNAL.of_kind("pageable") == {}
        if not reads_drafts:
            assert max(self.waits("collect")) == 1, dict(JOURNAL.syncs)
            assert JOURNAL.of_kind("blocking") == {}


Said = list[tuple[list[int], list[float]]]
"""Of each request its tokens and their log-probabilities."""


def said(llm: fwk.LLM, sampling: SamplingParams | list[SamplingParams], prompts: list[list[int]]) -> Said:
    done = llm.generate(prompts, sampling)
    return [(one.token_ids, [found.logprob for found in one.logprobs or []]) for one in done]


def assert_same(found: Said, wanted: Said) -> None:
    for mine, other in zip(found, wanted, strict=True):
        assert mine[0] == other[0]
        assert mine[1] == pytest.approx(other[1], abs=1e-4)


@contextmanager
def serving(model: Path, steps: Steps | None = None, **options: Any) -> Iterator[fwk.LLM]:
    """A model on the pretended device. The journal and ``steps`` have what happens once it is loaded."""
    with pretended() as plugins, fwk.LLM(str(model), plugins=plugins, device="pretended", **options) as llm:
        JOURNAL.clear()
        if steps is not None:
            steps.halves.clear()
        yield llm
