"""The model runner: one forward pass, from batch to result."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from fwk.errors import BlameSequence
from fwk.interfaces.attention import AttentionBackend, AttentionLayer
from fwk.interfaces.model import Model
from fwk.interfaces.speculative import DraftView, SpeculativeDecoder, Verified
from fwk.types import Batch, ForwardBatch, ScheduledSequence, SequenceResult, StepResult, TokenLogprobs
from fwk.worker.inputs import InputBuffers, StepRows
from fwk.worker.logprobs import ROWS_AT_ONCE, token_logprobs
from fwk.worker.sampling import SamplingPipeline
from fwk.worker.table import SequenceTable
from fwk.worker.verify import accepted


class ModelRunner:
    """Turns a ``Batch`` into a ``StepResult``. State between steps is in the table; inputs are in the buffers."""

    def __init__(
        self,
        *,
        model: Model,
        attention: AttentionBackend,
        layers: list[AttentionLayer],
        table: SequenceTable,
        inputs: InputBuffers,
        sampling: SamplingPipeline,
        decoder: SpeculativeDecoder | None = None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._layers = layers
        self._table = table
        self._inputs = inputs
        self._sampling = sampling
        self._decoder = decoder

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepResult:
        """Run one step."""
        started = time.perf_counter()
        failed = self._begin(batch)
        forward, rows = self._inputs.prepare(batch)
        launched = time.perf_counter()
        forward.plan = self._attention.plan(forward, self._layers)
        hidden = self._model.forward(forward)
        logits = self._model.logits(hidden.index_select(0, forward.logits_at)) if len(rows.slots) else None
        computed = time.perf_counter()
        results = self._results(batch, rows, logits, failed)
        self._add_prompt_logprobs(batch, forward, hidden, results)
        if self._decoder is not None:
            self._propose(batch, results)
        ended = time.perf_counter()
        return StepResult(batch.step, list(results.values()), computed - launched, ended - started)

    def _begin(self, batch: Batch) -> dict[int, str]:
        """Take in the plan; returns the slots whose sampling settings a processor could not take, and why."""
        for slot in batch.freed_slots:
            self._sampling.remove(slot)
        if self._decoder is not None and batch.freed_slots:
            self._decoder.forget(batch.freed_slots)
        self._table.begin(batch)
        failed: dict[int, str] = {}
        for new in batch.new:
            try:
                self._sampling.add(new)
            except BlameSequence as error:
                self._sampling.remove(new.slot)
                failed[new.slot] = str(error)
        return failed

    def _results(
        self, batch: Batch, rows: StepRows, logits: Tensor | None, failed: dict[int, str]
    ) -> dict[int, SequenceResult]:
        """Sample, verify drafts, and write the new tokens into the table."""
        picked = self._pick(logits, rows, failed) if logits is not None else []
        wants_logprobs = logits is not None and bool((self._table.logprobs[rows.slots] >= 0).any())
        results: dict[int, SequenceResult] = {}
        row = 0
        for scheduled in batch.sequences:
            if not scheduled.samples:
                self._table.finish(scheduled, [])
                if scheduled.slot in failed:  # found out with the first chunk: the others are not worth computing
                    results[scheduled.slot] = SequenceResult(scheduled.slot, [], error=failed[scheduled.slot])
                continue
            drafts = scheduled.draft_token_ids
            tokens = accepted(drafts, picked[row : row + 1 + len(drafts)])
            result = self._result(scheduled, tokens, failed)
            if wants_logprobs and result.error is None and logits is not None:
                result.logprobs = self._logprobs(scheduled.slot, logits[row : row + len(tokens)], tokens)
            results[scheduled.slot] = result
            row += 1 + len(drafts)
        return results

    def _result(self, scheduled: ScheduledSequence, tokens: list[int], failed: dict[int, str]) -> SequenceResult:
        slot = scheduled.slot
        if slot not in failed and -1 in tokens:
            failed[slot] = "no token could be chosen: the logits are not numbers, or none is allowed"
        if slot in failed:
            self._table.finish(scheduled, [0] * len(tokens))
            return SequenceResult(slot, [], error=failed[slot])
        self._table.finish(scheduled, tokens)
        return SequenceResult(slot, tokens)

    def _pick(self, logits: Tensor, rows: StepRows, failed: dict[int, str]) -> list[int]:
        """Sample every row. When a processor blames a sequence, the others are sampled without it."""
        good = np.flatnonzero(~np.isin(rows.slots, list(failed))) if failed else None
        while True:
            if good is None:
                part_logits, part = logits, rows
            elif not len(good):
                return [-1] * len(rows.slots)
            else:
                part_logits = logits[torch.from_numpy(good).to(logits.device)]
                part = StepRows(rows.sequences[good], rows.slots[good], rows.num_tokens[good])
            try:
                tokens = self._sampling.sample(part_logits, part)
            except BlameSequence as error:
                if error.slot not in part.slots:
                    raise RuntimeError(f"slot {error.slot} is blamed, but has no part in this step: {error}") from error
                failed[error.slot] = str(error)
                good = np.flatnonzero(~np.isin(rows.slots, list(failed)))
                continue
            if good is None:
                return tokens
            picked = [-1] * len(rows.slots)
            for row, token in zip(good.tolist(), tokens, strict=True):
                picked[row] = token
            return picked

    def _logprobs(self, slot: int, logits: Tensor, tokens: list[int]) -> list[TokenLogprobs] | None:
        num_top = int(self._table.logprobs[slot])
        return token_logprobs(logits, tokens, [num_top] * len(tokens)) if num_top >= 0 else None

    def _add_prompt_logprobs(
        self, batch: Batch, forward: ForwardBatch, hidden: Tensor, results: dict[int, SequenceResult]
    ) -> None:
        """Log-probabilities of the prompt tokens that follow this step's, for sequences that want them."""
        table = self._table
        for i, scheduled in enumerate(batch.sequences):
            slot = scheduled.slot
            num_top = int(table.prompt_logprobs[slot])
            if num_top < 0:
                continue
            start, end = int(forward.query_start_np[i]), int(forward.query_start_np[i + 1])
            position = int(forward.seq_lens_np[i]) - (end - start)
            count = min(end - start, int(table.num_prompt[slot]) - 1 - position)
            if count <= 0:
                continue
            found: list[TokenLogprobs] = []
            for offset in range(0, count, ROWS_AT_ONCE):
                n = min(ROWS_AT_ONCE, count - offset)
                logits = self._model.logits(hidden[start + offset : start + offset + n])
                first = position + offset + 1
                tokens = table.token_ids[slot, first : first + n].tolist()
                found.extend(token_logprobs(logits, tokens, [num_top] * n))
            results.setdefault(slot, SequenceResult(slot, [])).prompt_logprobs = found

    def _propose(self, batch: Batch, results: dict[int, SequenceResult]) -> None:
        """Ask the speculative decoder for the next step's drafts."""
        assert self._decoder is not None
        table = self._table
        sampled = [s for s in batch.sequences if s.samples and results[s.slot].error is None]
        if not sampled:
            return
        slots = np.array([s.slot for s in sampled], np.int64)
        num_drafts = np.array([len(s.draft_token_ids) for s in sampled], np.int64)
        num_accepted = np.array([len(results[s.slot].token_ids) - 1 for s in sampled], np.int64)
        self._decoder.observe(Verified(slots, num_drafts, num_accepted))
        num_tokens = table.num_tokens[slots]
        room = table.token_ids.shape[1] - 1 - num_tokens
        drafts = self._decoder.propose(DraftView(slots, num_tokens, room, table.token_ids))
        for slot, tokens, most in zip(slots.tolist(), drafts.token_ids, room.tolist(), strict=True):
            results[slot].draft_token_ids = tokens[: max(most, 0)]
