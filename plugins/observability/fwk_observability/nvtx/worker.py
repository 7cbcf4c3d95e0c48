"""The ranges: pushed before a step is launched, popped when it was."""

from __future__ import annotations

from typing import Any

import torch

from fwk.errors import ConfigError
from fwk.interfaces.observer import WorkerObserver, WorkerObserverContext
from fwk.types import Batch


class WorkerRanges(WorkerObserver):
    """A range for each step, named by its sequences and tokens."""

    wants_steps = True

    def __init__(self, context: WorkerObserverContext) -> None:
        super().__init__(context)
        if context.device.type != "cuda":
            raise ConfigError(
                f"--enable-nvtx: NVTX ranges are of NVIDIA's GPUs, and this server computes on {context.device.type}; "
                "--profiler-dir takes profiles there, too"
            )
        self._nvtx: Any = torch.cuda.nvtx

    def step_begins(self, batch: Batch) -> None:
        num_tokens = sum(s.num_new_tokens for s in batch.sequences)
        self._nvtx.range_push(f"step: {len(batch.sequences)} sequences, {num_tokens} tokens")

    def step_launched(self) -> None:
        self._nvtx.range_pop()
