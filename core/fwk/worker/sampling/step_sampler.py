"""From a step's logits to its results: verified tokens, ends of outputs, errors and log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from fwk.errors import BlameSequence
from fwk.interfaces.drafting import Drafting, Gain
from fwk.interfaces.logprobs import token_logprobs
from fwk.interfaces.step import LaunchedStep, StepRows
from fwk.types import ScheduledSequence, SequenceResult
from fwk.worker.runner.sequence_table import SequenceTable
from fwk.worker.sampling.pipeline import SamplingPipeline


class StepSampler:
    """Makes the result of every sequence of a step, and writes its new tokens into the table."""

    def __init__(self, table: SequenceTable, sampling: SamplingPipeline, drafting: Drafting) -> None:
        self._table = table
        self._sampling = sampling
        self._drafting = drafting

    def sample(self, step: LaunchedStep) -> dict[int, SequenceResult]:
        """Results by slot, of the sequences that sample or fail in this step."""
        rows, logits, failed = step.rows, step.logits, step.failed
        gained = self._gained(step, logits) if logits is not None else {}
        wants_logprobs = logits is not None and rows.sampling_state(self._table).wants_logprobs
        results: dict[int, SequenceResult] = {}
        asked: list[tuple[SequenceResult, list[int]]] = []  # whose log-probabilities are wanted, and their rows
        for scheduled in step.batch.sequences:
            slot = scheduled.slot
            if not scheduled.samples:
                self._table.finish(scheduled, [])
                if slot in failed:  # found out with the first chunk: the others are not worth computing
                    results[slot] = failure(failed[slot])
                continue
            tokens, at = gained[slot]
            result = self._result(scheduled, tokens, failed)
            if wants_logprobs and result.error is None and self._table.logprobs[slot] >= 0:
                asked.append((result, at[: len(result.token_ids)]))
            results[slot] = result
        if asked and logits is not None:
            self._add_logprobs(asked, logits)
        return results

    def _gained(self, step: LaunchedStep, logits: Tensor) -> dict[int, Gain]:
        """What each sequence that samples gains, by slot."""
        if step.rows.has_drafts:
            return self._drafting.verify(step)
        picked = self._sampling.sample_valid(logits, step.rows, step.failed)
        slots = step.rows.slots.tolist()
        return {slot: ([token], [row]) for row, (slot, token) in enumerate(zip(slots, picked, strict=True))}

    def reads_history(self, rows: StepRows) -> bool:
        """Whether the tokens of rows can only be chosen when the host has seen every token before them."""
        return self._sampling.reads_history(rows)

    def settled_each(self, slots: list[int], token_ids: list[int]) -> dict[int, SequenceResult]:
        """``settled`` of slots [n] that gained a token each, none of which was refused."""
        results = {slot: SequenceResult(slot, [token]) for slot, token in zip(slots, token_ids, strict=True)}
        for slot, end in self._sampling.ends_each(slots, token_ids).items():
            if isinstance(end, BlameSequence):
                results[slot] = failure(end)
            else:
                results[slot] = SequenceResult(slot, results[slot].token_ids[:end], is_complete=True)
        return results

    def pick(self, step: LaunchedStep, logits: Tensor) -> Tensor:
        """A token for every row, [num_rows] int64 as ``SamplingPipeline.pick``, which the host does not wait for."""
        if step.rows.has_drafts:
            return self._drafting.pick(step)
        return self._sampling.pick(logits, step.rows, step.failed)

    def verified(
        self, step: LaunchedStep, scheduled: ScheduledSequence, picked: list[int], row: int
    ) -> tuple[SequenceResult, list[int]]:
        """The result of a sequence with drafts, whose rows from ``row`` on got ``picked``, and the rows it stands on.

        The table takes the step in.
        """
        tokens, rows = self._drafting.gained(step, scheduled, picked, row)
        return self._result(scheduled, tokens, step.failed), rows

    def settled(self, slot: int, token: int | None, failed: dict[int, BlameSequence]) -> SequenceResult | None:
        """The result of a sequence whose step has counted already; None for a chunk of a prompt, which has none.

        token: what was picked, None for such a chunk.
        """
        if token is None:
            return failure(failed[slot]) if slot in failed else None
        self._note_unpicked(slot, [token], failed)
        stand = self._ends(slot, [token], failed)
        if slot in failed:
            return failure(failed[slot])
        return SequenceResult(slot, [token][:stand], is_complete=stand is not None)

    def _result(
        self, scheduled: ScheduledSequence, tokens: list[int], failed: dict[int, BlameSequence]
    ) -> SequenceResult:
        slot = scheduled.slot
        self._note_unpicked(slot, tokens, failed)
        stand = self._ends(slot, tokens, failed)
        finish = self._drafting.finish if scheduled.draft_token_ids else self._table.finish
        if slot in failed:
            finish(scheduled, [0] * len(tokens))
            return failure(failed[slot])
        tokens = tokens[:stand]
        finish(scheduled, tokens)
        return SequenceResult(slot, tokens, is_complete=stand is not None)

    def _note_unpicked(self, slot: int, tokens: list[int], failed: dict[int, BlameSequence]) -> None:
        lowest = min(tokens)
        if lowest < 0 and slot not in failed:
            failed[slot] = self._sampling.refusal(slot, lowest)

    def _ends(self, slot: int, tokens: list[int], failed: dict[int, BlameSequence]) -> int | None:
        """How many of the tokens stand when a processor says that the output is complete with them."""
        try:
            return self._sampling.ends(slot, tokens) if slot not in failed else None
        except BlameSequence as error:
            failed[slot] = error
            return None

    def _add_logprobs(self, asked: list[tuple[SequenceResult, list[int]]], logits: Tensor) -> None:
        """Log-probabilities of all tokens of a step, in one question to the device."""
        rows = [row for _, mine in asked for row in mine]
        tokens = [token for result, _ in asked for token in result.token_ids]
        num_top = [int(self._table.logprobs[result.slot]) for result, mine in asked for _ in mine]
        if rows != list(range(logits.shape[0])):
            logits = logits.index_select(0, torch.tensor(rows, dtype=torch.int64).to(logits.device))
        found = iter(token_logprobs(logits, tokens, num_top))
        for result, mine in asked:
            result.logprobs = [next(found) for _ in mine]


def failure(error: BlameSequence) -> SequenceResult:
    """The end of the sequence that it blames."""
    return SequenceResult(error.slot, [], error=str(error), is_refusal=error.is_refusal)
