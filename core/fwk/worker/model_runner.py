"""The model runner: one forward pass, from batch to result."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import torch
from torch import Tensor

from fwk.errors import BlameSequence
from fwk.interfaces.attention import AttentionBackend, AttentionLayer
from fwk.types import Batch, ForwardBatch, ScheduledSequence, SequenceResult, StepResult, TokenLogprobs
from fwk.worker.adapters import AdapterStore, NoAdapters
from fwk.worker.drafting import NoDrafting, walk
from fwk.worker.graphs import StepModel
from fwk.worker.inputs import InputBuffers, StepRows
from fwk.worker.logprobs import ROWS_AT_ONCE, token_logprobs
from fwk.worker.sampling import SamplingPipeline
from fwk.worker.sequence_table import SequenceTable
from fwk.worker.verify import DraftTree, accepted


class ModelRunner:
    """Turns a ``Batch`` into a ``StepResult``. State between steps is in the table; inputs are in the buffers."""

    def __init__(
        self,
        *,
        model: StepModel,
        attention: AttentionBackend,
        layers: list[AttentionLayer],
        table: SequenceTable,
        inputs: InputBuffers,
        sampling: SamplingPipeline,
        drafting: NoDrafting,
        adapters: AdapterStore | NoAdapters,
    ) -> None:
        self.model = model
        self._attention = attention
        self._layers = layers
        self._table = table
        self._inputs = inputs
        self._sampling = sampling
        self._drafting = drafting
        self._adapters = adapters

    def execute(self, batch: Batch) -> StepResult:
        """Run one step."""
        if torch.is_inference_mode_enabled():  # as in a process of ours: entering costs as much as building inputs
            return self._execute(batch)
        with torch.inference_mode():
            return self._execute(batch)

    def _execute(self, batch: Batch) -> StepResult:
        started = time.perf_counter()
        failed = self._begin(batch)
        trees = self._drafting.trees(batch.sequences)
        forward, rows = self._inputs.prepare(batch, trees)
        launched = time.perf_counter()
        forward.is_greedy = self._sampling.is_greedy(rows)
        hidden, logits = self.model.run(self._planned(forward))
        computed = time.perf_counter()
        self._drafting.follow(forward)
        results = self._results(batch, rows, logits, failed, trees)
        self._add_prompt_logprobs(batch, forward, hidden, results)
        self._drafting.propose([s for s in batch.sequences if s.samples and results[s.slot].goes_on], results)
        ended = time.perf_counter()
        return StepResult(batch.step, list(results.values()), computed - launched, ended - started)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture, and run a decode step of one token before there is any; nobody reads yet where its K and V go."""
        self.model.prepare(lambda size: self._planned(self._inputs.blank(*size)))
        first = np.zeros(1, np.int64)
        self.model.run(self._planned(self._inputs.prepare_one(first, first, first)))

    def _planned(self, forward: ForwardBatch) -> ForwardBatch:
        """The same batch, ready for the model."""
        self._adapters.plan(forward)
        forward.plan = self._attention.plan(forward, self._layers)
        return forward

    def _begin(self, batch: Batch) -> dict[int, str]:
        """Take in the plan; returns the slots whose sampling settings a processor could not take, and why."""
        for slot in batch.freed_slots:
            self._sampling.remove(slot)
        self._drafting.forget(batch.freed_slots)
        self._table.begin(batch)
        self._adapters.begin(batch)
        failed: dict[int, str] = {}
        for new in batch.new:
            try:
                self._sampling.add(new)
            except BlameSequence as error:
                self._sampling.remove(new.slot)
                failed[new.slot] = str(error)
        return failed

    def _results(
        self,
        batch: Batch,
        rows: StepRows,
        logits: Tensor | None,
        failed: dict[int, str],
        trees: dict[int, DraftTree],
    ) -> dict[int, SequenceResult]:
        """Sample, verify drafts, and write the new tokens into the table."""
        gained = self._gained(batch, rows, logits, failed, trees) if logits is not None else {}
        wants_logprobs = logits is not None and rows.sampling_state(self._table).wants_logprobs
        results: dict[int, SequenceResult] = {}
        for scheduled in batch.sequences:
            slot = scheduled.slot
            if not scheduled.samples:
                self._table.finish(scheduled, [])
                if slot in failed:  # found out with the first chunk: the others are not worth computing
                    results[slot] = SequenceResult(slot, [], error=failed[slot])
                continue
            tokens, at = gained[slot]
            result = self._result(scheduled, tokens, failed)
            if wants_logprobs and result.error is None and logits is not None:
                kept = result.token_ids
                result.logprobs = self._logprobs(slot, logits[at][: len(kept)], kept)
            results[slot] = result
        return results

    def _gained(
        self, batch: Batch, rows: StepRows, logits: Tensor, failed: dict[int, str], trees: dict[int, DraftTree]
    ) -> dict[int, tuple[list[int], slice | list[int]]]:
        """What each sequence gains: its accepted drafts and the token after them, and the rows that chose them."""
        chains = np.flatnonzero(~np.isin(rows.slots, list(trees))) if trees else None
        drawn = self._drawn(batch)
        rows = dataclasses.replace(rows, drawn=drawn) if drawn else rows
        if chains is None:
            picked = self._pick(logits, rows, failed)
        else:
            picked = [-1] * len(rows.slots)
            if len(chains):
                part = self._pick(logits[torch.from_numpy(chains).to(logits.device)], rows.take(chains), failed)
                for row, token in zip(chains.tolist(), part, strict=True):
                    picked[row] = token
        gained: dict[int, tuple[list[int], slice | list[int]]] = {}
        first_rows: dict[int, tuple[int, int]] = {}
        row = 0
        for place, scheduled in enumerate(batch.sequences):
            if scheduled.samples:
                drafts = scheduled.draft_token_ids
                tokens = accepted(drafts, picked[row : row + 1 + len(drafts)])
                gained[scheduled.slot] = (tokens, slice(row, row + len(tokens)))
                first_rows[scheduled.slot] = (place, row)
                row += 1 + len(drafts)
        if trees:
            self._walk_trees(logits, failed, trees, first_rows, gained)
        return gained

    def _walk_trees(
        self,
        logits: Tensor,
        failed: dict[int, str],
        trees: dict[int, DraftTree],
        first_rows: dict[int, tuple[int, int]],
        gained: dict[int, tuple[list[int], slice | list[int]]],
    ) -> None:
        paths = walk(trees, first_rows, logits, self._table, lambda part, rows: self._pick(part, rows, failed))
        for slot, (tokens, path) in paths.items():
            self._drafting.keep(slot, path)
            row = first_rows[slot][1]
            gained[slot] = (tokens, [row, *(row + 1 + draft for draft in path)])

    def _drawn(self, batch: Batch) -> dict[tuple[int, int], tuple[int, Tensor]]:
        """Drafts that were drawn, by slot and by the number of tokens before them."""
        found: dict[tuple[int, int], tuple[int, Tensor]] = {}
        for scheduled in batch.sequences:
            proposal = self._drafting.drawn(scheduled.slot) if scheduled.draft_token_ids else None
            if proposal is not None:
                start = int(self._table.num_tokens[scheduled.slot])
                for i, draft in enumerate(scheduled.draft_token_ids):
                    found[scheduled.slot, start + i] = (draft, proposal[i])
        return found

    def _result(self, scheduled: ScheduledSequence, tokens: list[int], failed: dict[int, str]) -> SequenceResult:
        slot = scheduled.slot
        if slot not in failed and -1 in tokens:
            failed[slot] = "no token could be chosen: the logits are not numbers, or none is allowed"
        stand = self._ends(slot, tokens, failed)
        if slot in failed:
            self._table.finish(scheduled, [0] * len(tokens))
            return SequenceResult(slot, [], error=failed[slot])
        tokens = tokens[:stand]
        self._table.finish(scheduled, tokens)
        return SequenceResult(slot, tokens, is_complete=stand is not None)

    def _ends(self, slot: int, tokens: list[int], failed: dict[int, str]) -> int | None:
        """How many of the tokens stand when a processor says that the output is complete with them."""
        try:
            return self._sampling.ends(slot, tokens) if slot not in failed else None
        except BlameSequence as error:
            failed[slot] = str(error)
            return None

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
                part = rows.take(good)
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
                logits = self.model.model.logits(hidden[start + offset : start + offset + n])
                first = position + offset + 1
                tokens = table.token_ids[slot, first : first + n].tolist()
                found.extend(token_logprobs(logits, tokens, [num_top] * n))
            results.setdefault(slot, SequenceResult(slot, [])).prompt_logprobs = found
