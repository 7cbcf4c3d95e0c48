"""The runner of a model that does not generate: from prompts to one vector each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fwk.interfaces.model import Encoder
from fwk.types import Batch, ForwardBatch, PoolingConfig, SequenceResult, StepResult
from fwk.worker.kv.states import StateStore
from fwk.worker.runner.inputs import InputBuffers
from fwk.worker.runner.sequence_table import SequenceTable


class PoolingRunner:
    """Turns a ``Batch`` of prompts into a ``StepResult`` with the embeddings of those whose last token is in it.

    An encoder keeps nothing, and its prompts are whole; a decoder's K/V are in the cache.
    """

    def __init__(
        self,
        *,
        model: Encoder,
        pooling: PoolingConfig | None,
        plan_attention: Callable[[ForwardBatch], Any],
        states: StateStore | None,
        table: SequenceTable,
        inputs: InputBuffers,
    ) -> None:
        self.model = model
        self._pooling = pooling or PoolingConfig()
        self._plan_attention = plan_attention
        self._states = states
        self._table = table
        self._inputs = inputs

    depth = 1

    def launch(self, batch: Batch) -> StepResult:
        """Run a step: its vectors are read at once."""
        return self.execute(batch)

    def collect(self, pending: StepResult) -> StepResult:
        return pending

    def settle(self) -> None:
        """No step is in flight."""

    def forget(self, slots: list[int]) -> None:
        """Nothing is kept of sequences that have left."""

    def replace_drafts(self, slots: list[int]) -> None:
        """Nothing is drafted."""

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepResult:
        """Run one step."""
        started = time.perf_counter()
        self._table.begin(batch)
        if self._states is not None:
            self._states.begin(batch)
        forward, _ = self._inputs.prepare(batch)
        forward.plan = self._plan_attention(forward)
        starts = [int(self._table.segment_start[s.slot]) for s in batch.sequences]
        forward.extras["segment_start"] = starts
        launched = time.perf_counter()
        hidden = self.model.forward(forward)
        if self._states is not None:
            self._states.save(batch)
        pooled = self.model.pool(hidden, forward)
        if pooled is None:
            pooled = pool(hidden, forward, self._pooling)
        computed = time.perf_counter()
        results: list[SequenceResult] = []
        for scheduled, vector in zip(batch.sequences, pooled, strict=True):
            self._table.finish(scheduled, [])
            if not scheduled.samples:
                continue
            if bool(torch.isfinite(vector).all()):
                embedding = vector.cpu().numpy().astype("<f4", copy=False).tobytes()
                results.append(SequenceResult(scheduled.slot, [], embedding=embedding))
            else:
                results.append(SequenceResult(scheduled.slot, [], error="the embedding is not made of finite numbers"))
        return StepResult(batch.step, results, computed - launched, time.perf_counter() - started)


def pool(hidden: Tensor, batch: ForwardBatch, pooling: PoolingConfig) -> Tensor | Sequence[Tensor]:
    """Hidden states [num_tokens, hidden_size] to vectors [num_seqs, hidden_size] in float32.

    With pooling ``token``, to a tensor [num_tokens_of_it, hidden_size] for each sequence. A sequence's vectors depend
    on its own tokens alone; a mean is summed in their order.
    """
    starts, ends = batch.query_start[:-1].long(), batch.query_start[1:].long()
    if pooling.kind == "token":
        vectors = F.normalize(hidden.float(), dim=-1) if pooling.normalize else hidden.float()
        return vectors.split([end - start for start, end in zip(starts.tolist(), ends.tolist(), strict=True)])
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
