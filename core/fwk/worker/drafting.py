"""The runner's side of a speculative decoder: asks for drafts, and keeps how they were made until verification."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fwk.errors import BlameSequence
from fwk.interfaces.attention import AttentionBackend, AttentionLayer
from fwk.interfaces.speculative import DraftSteps, DraftView, SpeculativeDecoder, TargetStep, Verified
from fwk.types import Batch, ForwardBatch, ScheduledSequence, SequenceResult
from fwk.worker.draft_tree import DraftTree
from fwk.worker.forced import NoForcedDrafts
from fwk.worker.inputs import InputBuffers, StepRows
from fwk.worker.sampling import SamplingPipeline
from fwk.worker.sequence_table import SequenceTable


@dataclass(slots=True)
class Proposal:
    """How the drafts of one sequence were made; both None for a chain that was certain."""

    parents: list[int] | None
    probabilities: Tensor | None  # [num_drafts, vocab_size]


class NoDrafting:
    """The runner's drafts when there is no speculative decoder."""

    max_drafts = 0
    reads_hidden = False
    num_taps = 0
    forced = NoForcedDrafts()
    """What is drafted of text that must come, whatever the decoder says."""

    def draft(self, sampled: list[ScheduledSequence], results: dict[int, SequenceResult]) -> None:
        """Put drafts into the results of a step."""
        self.propose(sampled, results)
        for slot in self.forced.enter(sampled, results, self.parents):
            self.replace(slot)

    def forget(self, slots: Sequence[int]) -> None:
        """These slots' sequences are gone."""

    def trees(self, sequences: Iterable[ScheduledSequence]) -> dict[int, DraftTree]:
        """The trees among the drafts of this step, by slot."""
        return {}

    def drawn(self, slot: int) -> Tensor | None:
        """The distributions the drafts of a slot were drawn from: [num_drafts, vocab_size]; None: they were certain."""
        return None

    def parents(self, slot: int) -> list[int] | None:
        """Which of a slot's newest drafts each of them follows; None for a chain."""
        return None

    def replace(self, slot: int) -> None:
        """Others take the place of a slot's newest drafts: a chain, and certain."""

    def is_relaxed(self, slot: int) -> bool:
        """Whether the drafts of a slot are kept more often than the target would pick them."""
        return False

    def follow(self, forward: ForwardBatch) -> None:
        """The target has computed these tokens."""

    def learn(
        self,
        batch: Batch,
        forward_start: np.ndarray,
        hidden: Tensor,
        results: dict[int, SequenceResult],
        trees: dict[int, DraftTree],
    ) -> None:
        """Tell the decoder what the target computed of the tokens that stand; the table has taken them in.

        forward_start: [num_seqs + 1]: first row of each sequence in ``hidden``, as ``StepModel.run`` returns it.
        """

    def keep(self, slot: int, path: list[int]) -> None:
        """Move the K/V of the accepted drafts of a tree (indices) to where a chain's would be.

        Comes before the table takes the tokens in.
        """

    def propose(self, sampled: list[ScheduledSequence], results: dict[int, SequenceResult]) -> None:
        """Tell the decoder what became of its drafts, and put new ones into the results."""


class Drafting(NoDrafting):
    """A decoder, the drafts it has made that are not verified yet, and the steps of its own model."""

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        table: SequenceTable,
        inputs: InputBuffers,
        attention: AttentionBackend,
        layers: list[AttentionLayer],
        sampling: SamplingPipeline,
        num_taps: int = 0,
    ) -> None:
        """num_taps: of the target that ``learn`` gets alongside its hidden states."""
        self._decoder = decoder
        self.num_taps = num_taps
        self._table = table
        self._attention = attention
        self._layers = layers
        self._steps = (inputs, sampling)
        self._made: dict[int, Proposal] = {}
        self.max_drafts = decoder.max_drafts
        self.reads_hidden = decoder.reads_hidden

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._made.pop(slot, None)
        if slots:
            self._decoder.forget(slots)

    def trees(self, sequences: Iterable[ScheduledSequence]) -> dict[int, DraftTree]:
        found: dict[int, DraftTree] = {}
        for scheduled in sequences:
            made = self._made.get(scheduled.slot) if scheduled.draft_token_ids else None
            if made is not None and made.parents is not None:
                found[scheduled.slot] = DraftTree(scheduled.draft_token_ids, made.parents)
        return found

    def drawn(self, slot: int) -> Tensor | None:
        made = self._made.get(slot)
        return None if made is None else made.probabilities

    def is_relaxed(self, slot: int) -> bool:
        return slot in self._made and not self._decoder.acceptance.is_exact

    def parents(self, slot: int) -> list[int] | None:
        made = self._made.get(slot)
        return None if made is None else made.parents

    def replace(self, slot: int) -> None:
        self._made.pop(slot, None)

    def follow(self, forward: ForwardBatch) -> None:
        self._decoder.follow(forward)

    def learn(
        self,
        batch: Batch,
        forward_start: np.ndarray,
        hidden: Tensor,
        results: dict[int, SequenceResult],
        trees: dict[int, DraftTree],
    ) -> None:
        if not self.reads_hidden:
            return
        slots: list[int] = []
        rows: list[np.ndarray] = []
        for i, scheduled in enumerate(batch.sequences):
            slot, num_drafts = scheduled.slot, len(scheduled.draft_token_ids)
            result = results.get(slot)
            if result is not None and (not result.goes_on or self._table.is_undone(scheduled, result.token_ids)):
                continue
            first, end = int(forward_start[i]), int(forward_start[i + 1])
            known = np.arange(first, end - num_drafts)
            num_kept = len(result.token_ids) - 1 if result is not None and scheduled.samples else 0
            kept = np.array(trees[slot].path[:num_kept], np.int64) if slot in trees else np.arange(num_kept)
            slots.append(slot)
            rows.append(np.concatenate((known, end - num_drafts + kept)))
        if slots:
            self._decoder.learn(self._step(np.array(slots, np.int64), rows, hidden))

    def _step(self, slots: np.ndarray, rows: list[np.ndarray], hidden: Tensor) -> TargetStep:
        counts = np.array([len(some) for some in rows], np.int64)
        starts = np.zeros(len(slots) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        together = np.concatenate(rows)
        if len(together) != hidden.shape[0]:
            hidden = hidden.index_select(0, self._steps[1].send(together))
        own, *taps = hidden.chunk(1 + self.num_taps, 1)

        def batch() -> ForwardBatch:
            ends = self._table.num_computed[slots]
            positions = np.arange(starts[-1]) - np.repeat(starts[1:] - ends, counts)
            return self.plan(self._steps[0].prepare_next(np.repeat(slots, counts), positions, starts, ends))

        return TargetStep(slots, starts, own, tuple(taps), batch)

    def keep(self, slot: int, path: list[int]) -> None:
        if path == list(range(len(path))):
            return
        table = self._table
        first = int(table.num_tokens[slot])
        send = self._steps[1].send
        for group in range(len(table.block_tables)):
            layers = [layer for layer in self._layers if layer.kv_group == group]
            source = table.kv_slots(slot, first + np.array(path, np.int64), group)
            target = table.kv_slots(slot, first + np.arange(len(path)), group)
            self._attention.move(layers, send(source), send(target))

    def propose(self, sampled: list[ScheduledSequence], results: dict[int, SequenceResult]) -> None:
        if not sampled:
            return
        table = self._table
        slots = np.array([s.slot for s in sampled], np.int64)
        own = [s for s in sampled if s.slot in self._made]  # not those that others took the place of
        self._decoder.observe(
            Verified(
                np.array([s.slot for s in own], np.int64),
                np.array([len(s.draft_token_ids) for s in own], np.int64),
                np.array([len(results[s.slot].token_ids) - 1 for s in own], np.int64),
            )
        )
        undone = {s.slot for s in sampled if table.is_undone(s, results[s.slot].token_ids)}
        if undone:  # their next step computes what stands, and no drafts
            slots = np.array([slot for slot in slots.tolist() if slot not in undone], np.int64)
            if not len(slots):
                return
        num_tokens = table.num_tokens[slots]
        room = np.minimum(table.num_blocks[slots] * table.block_size, table.token_ids.shape[1] - 1) - num_tokens
        most = np.clip(room, 0, self._decoder.max_drafts)
        steps = _Steps(self, *self._steps, slots, num_tokens)
        drafts = self._decoder.propose(DraftView(slots, num_tokens, most, table.token_ids, steps))
        start = 0
        for i, (slot, tokens) in enumerate(zip(slots.tolist(), drafts.token_ids, strict=True)):
            end = start + len(tokens)
            parents = None if drafts.parents is None else drafts.parents[i]
            drawn = None if drafts.probabilities is None else drafts.probabilities[start:end]
            if parents is not None and drawn is not None:
                raise ValueError("a speculative decoder drew the drafts of a tree: only those of chains may be drawn")
            self._made[slot] = Proposal(parents, drawn)
            results[slot].draft_token_ids = tokens[: int(most[i])]
            start = end

    def plan(self, forward: ForwardBatch) -> ForwardBatch:
        """Make a batch ready for a forward pass."""
        forward.plan = self._attention.plan(forward, self._layers)
        return forward


class _Steps(DraftSteps):
    """Steps over the sequences of one view."""

    def __init__(
        self,
        drafting: Drafting,
        inputs: InputBuffers,
        sampling: SamplingPipeline,
        slots: np.ndarray,
        num_tokens: np.ndarray,
    ) -> None:
        self._drafting = drafting
        self._inputs = inputs
        self._sampling = sampling
        self._slots = slots
        self._num_tokens = num_tokens

    def batch(self, rows: np.ndarray, token_ids: Sequence[int], ahead: int) -> ForwardBatch:
        positions = self._num_tokens[rows] - 1 + ahead
        return self._drafting.plan(self._inputs.prepare_one(self._slots[rows], np.asarray(token_ids), positions))

    def nodes(
        self, rows: np.ndarray, token_ids: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> ForwardBatch:
        trees = [DraftTree(list(tokens), above) for tokens, above in zip(token_ids, parents, strict=True)]
        first = self._num_tokens[rows] - 1
        return self._drafting.plan(self._inputs.prepare_nodes(self._slots[rows], token_ids, trees, first))

    def pick(self, logits: Tensor, rows: np.ndarray, ahead: int) -> list[int]:
        num_tokens = self._num_tokens[rows] + ahead
        step = StepRows(rows, self._slots[rows], num_tokens)
        try:
            picked = self._sampling.sample(logits, step)
        except BlameSequence:  # verification will meet it again, and blame whom it must
            return [-1] * len(rows)
        self._inputs.table.token_ids[self._slots[rows], num_tokens] = np.maximum(picked, 0)
        return picked
