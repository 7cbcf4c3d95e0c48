"""A worker for other processes that starts at once (no torch, no numpy), with faults at the steps its recipe names.

It says what ``fake_engine`` says after the same tokens, but has no K/V memory.
"""

from __future__ import annotations

import os
import signal
import time
import zlib
from array import array
from pathlib import Path
from typing import Any

from fwk.errors import InvalidRequest, ModelLoadError
from fwk.interfaces.executor import Worker, WorkerInfo, WorkerRecipe
from fwk.interfaces.parallel import ParallelGroup
from fwk.types import Batch, SequenceResult, StepResult

EXIT_CODE = 99
VOCAB = 97


def recipe(**config: Any) -> WorkerRecipe:
    """``faults``: rank -> step -> one of exit, stop, raise, late_exit, other_token, wait:FILE; step 0 is loading."""
    return WorkerRecipe(f"{__name__}:make", {"num_blocks": 64, "faults": {}, "connects": False, **config})


def make(config: dict[str, Any], group: ParallelGroup) -> Worker:
    return RemoteWorker(config, group)


class RemoteWorker(Worker):
    def __init__(self, config: dict[str, Any], group: ParallelGroup) -> None:
        self._config = config
        self._faults: dict[str, str] = config["faults"].get(str(group.rank), {})
        self._group = group
        self._tokens: dict[int, list[int]] = {}  # by slot
        self._num_computed: dict[int, int] = {}
        self._num_steps = 0

    def load(self) -> WorkerInfo:
        self._commit(0)
        if self._config["connects"]:
            import torch

            self._group.all_reduce(torch.zeros(1))
        return WorkerInfo(self._config["num_blocks"] - self._group.rank * ("fewer_blocks" in self._faults), VOCAB, {})

    def execute(self, batch: Batch) -> StepResult:
        self._num_steps += 1
        fault = self._commit(self._num_steps)
        for new in batch.new:
            self._tokens[new.slot] = list(new.token_ids)
            self._num_computed[new.slot] = new.num_computed_tokens
        results: list[SequenceResult] = []
        for s in batch.sequences:
            tokens = self._tokens[s.slot]
            self._num_computed[s.slot] += s.num_new_tokens
            if s.samples:
                assert self._num_computed[s.slot] == len(tokens)
                tokens.append(zlib.crc32(array("i", tokens).tobytes()) % VOCAB + (fault == "other_token"))
                results.append(SequenceResult(s.slot, tokens[-1:]))
        return StepResult(batch.step, results)

    def call(self, name: str, *args: Any) -> Any:
        match name:
            case "where":
                return [self._group.rank, self._group.size, self._num_steps, *args]
            case "place":
                return [self._group.local_rank, self._group.local_size]
            case "environment":
                return {name: os.environ.get(name, "") for name in args}
            case "refuse":
                raise InvalidRequest(f"no {args[0]}", "name")
            case "refuse_on_rank_1":
                if self._group.rank == 1:
                    raise InvalidRequest("not here")
                return None
            case "torch_group":
                return self._collectives()
        return KeyError(name)  # which no message can carry

    def close(self) -> None:
        if "hangs_in_close" in self._faults:
            time.sleep(60)

    def _commit(self, step: int) -> str:
        fault, _, detail = self._faults.get(str(step), "").partition(":")
        if fault in ("late_exit", "late_raise"):
            time.sleep(0.2)
        match fault:
            case "exit" | "late_exit":
                os._exit(EXIT_CODE)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise" | "late_raise":
                raise ZeroDivisionError("a fault of the tests")
            case "refuse":
                raise ModelLoadError("9 heads cannot be shared")
            case "wait":
                while not Path(detail).exists():
                    time.sleep(0.01)
        return fault

    def _collectives(self) -> list[Any]:
        """Sums and joins of tensors the test knows, as lists."""
        import torch

        rank = self._group.rank
        x = torch.arange(6, dtype=torch.float32).reshape(2, 3) + 10 * rank
        found = [self._group.all_gather(x, dim).tolist() for dim in (0, 1, -1)]
        found.append(self._group.all_gather(x.t(), 0).tolist())
        found.append(self._group.all_reduce(x.clone().t()).tolist())
        found.append(self._group.all_reduce(torch.full((2,), 1.5, dtype=torch.bfloat16)).tolist())
        found.append(int(self._group.all_gather(torch.tensor([7 - rank]), 0).min()))
        return found
