"""A worker that encodes and computes no steps: one feature's part, and the served model without its layers."""

from __future__ import annotations

from typing import Any

import torch

from fwk.errors import FwkError
from fwk.interfaces.executor import Worker, WorkerInfo
from fwk.interfaces.parallel import ParallelGroup
from fwk.types import Batch, StepResult
from fwk.worker.builder import WorkerBuilder
from fwk.worker.remote import settle
from fwk_process.malloc import large_blocks_returned
from fwk_process.threads import half_of_torchs_threads


class EncodingWorker(Worker):
    """Loads what encodes, and answers calls of the feature's part."""

    def __init__(self, builder: WorkerBuilder, feature: str) -> None:
        self._builder = builder
        self._feature = feature

    @torch.inference_mode()
    def load(self) -> WorkerInfo:
        with half_of_torchs_threads(), large_blocks_returned():
            self._builder.build_encoder(self._feature)
        return WorkerInfo(num_blocks=0, vocab_size=0, chosen={})

    def execute(self, batch: Batch) -> StepResult:
        raise FwkError("this worker encodes: it computes no steps")

    @torch.inference_mode()
    def call(self, name: str, *args: Any) -> Any:
        return self._builder.parts.operations[name](*args)

    def close(self) -> None:
        self._builder.parts.close()


def make_encoder(plain: dict[str, Any], group: ParallelGroup) -> Worker:
    """The maker of ``ServerPartContext.encoder``. Raises ``PluginError`` when this process sees other plugins."""
    feature, index = plain["feature"], plain["engine_index"]
    config, setup = settle(plain, f"encoder {index}", group)
    return EncodingWorker(WorkerBuilder(config, setup, group, index), feature)
