"""The runner of a model that does not generate: from whole sequences to one vector each."""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fwk.interfaces.model import Encoder
from fwk.types import Batch, ForwardBatch, PoolingConfig, SequenceResult, StepResult
from fwk.worker.inputs import InputBuffers
from fwk.worker.sequence_table import SequenceTable


class PoolingRunner:
    """Turns a ``Batch`` of whole prompts into a ``StepResult`` with embeddings; nothing lasts longer than its step."""

    def __init__(
        self, *, model: Encoder, pooling: PoolingConfig | None, table: SequenceTable, inputs: InputBuffers
    ) -> None:
        self._model = model
        self._pooling = pooling or PoolingConfig()
        self._table = table
        self._inputs = inputs

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepResult:
        """Run one step."""
        started = time.perf_counter()
        self._table.begin(batch)
        forward, _ = self._inputs.prepare(batch)
        launched = time.perf_counter()
        hidden = self._model.forward(forward)
        pooled = self._model.pool(hidden, forward)
        if pooled is None:
            pooled = pool(hidden, forward, self._pooling)
        vectors = pooled.cpu().numpy().astype("<f4", copy=False)
        computed = time.perf_counter()
        results: list[SequenceResult] = []
        for scheduled, vector in zip(batch.sequences, vectors, strict=True):
            self._table.finish(scheduled, [])
            if np.isfinite(vector).all():
                results.append(SequenceResult(scheduled.slot, [], embedding=vector.tobytes()))
            else:
                results.append(SequenceResult(scheduled.slot, [], error="the embedding is not made of finite numbers"))
        return StepResult(batch.step, results, computed - launched, time.perf_counter() - started)


def pool(hidden: Tensor, batch: ForwardBatch, pooling: PoolingConfig) -> Tensor:
    """Hidden states [num_tokens, hidden_size] to vectors [num_seqs, hidden_size] in float32.

    A sequence's vector depends on its own tokens alone, summed in their order.
    """
    starts, ends = batch.query_start[:-1].long(), batch.query_start[1:].long()
    if pooling.kind == "cls":
        vectors = hidden.index_select(0, starts).float()
    elif pooling.kind == "last":
        vectors = hidden.index_select(0, ends - 1).float()
    else:
        lengths = ends - starts
        owner = torch.repeat_interleave(torch.arange(len(lengths), device=hidden.device), lengths)
        sums = torch.zeros((len(lengths), hidden.shape[1]), dtype=torch.float32, device=hidden.device)
        vectors = sums.index_add_(0, owner, hidden.float()) / lengths[:, None]
    return F.normalize(vectors, dim=-1) if pooling.normalize else vectors
