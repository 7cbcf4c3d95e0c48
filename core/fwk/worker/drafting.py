"""The runner's side of a speculative decoder: asks for drafts, and keeps how they were made until verification."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fwk.interfaces.attention import AttentionBackend, AttentionLayer
from fwk.interfaces.speculative import Drafts, DraftView, SpeculativeDecoder, TargetStep, Verified
from fwk.types import Batch, ForwardBatch, ScheduledSequence, SequenceResult
from fwk.worker.draft_steps import Steps
from fwk.worker.draft_store import DraftStore, StoredDrafts, on_host
from fwk.worker.draft_tree import DraftTree
from fwk.worker.forced import NoForcedDrafts
from fwk.worker.inputs import InputBuffers
from fwk.worker.sampling import SamplingPipeline
from fwk.worker.sequence_table import SequenceTable
from fwk.worker.step_rows import StepRows


@dataclass(frozen=True, slots=True)
class Proposal:
    """How the drafts of one sequence were made; both None for a chain that was certain."""

    parents: list[int] | None
    probabilities: Tensor | None  # [num_drafts, vocab_size]


CERTAIN = Proposal(None, None)


class NoDrafting:
    """The runner's drafts when there is no speculative decoder."""

    max_drafts = 0
    reads_hidden = False
    num_taps = 0
    runs_ahead = False
    """Whether it drafts for the step after one in flight (``SpeculativeDecoder.drafts_ahead``)."""
    forced = NoForcedDrafts()
    """What is drafted of text that must come, whatever the decoder says."""

    def draft(
        self, sampled: list[ScheduledSequence], results: dict[int, SequenceResult], following: Batch | None = None
    ) -> None:
        """Put drafts into the results of a step. following: the one that was launched after it already."""
        self.propose(sampled, results, following)
        if not self.forced.is_any:
            return
        for slot in self.forced.enter(sampled, results, self.parents):
            self.replace(slot)

    def forget(self, slots: Sequence[int]) -> None:
        """These slots' sequences are gone."""

    def trees(self, sequences: Iterable[ScheduledSequence]) -> dict[int, DraftTree]:
        """The trees among the drafts of this step that the host knows, by slot."""
        return {}

    def has_hidden_trees(self, sequences: Iterable[ScheduledSequence]) -> bool:
        """Whether some of this step's drafts are trees that only the device knows."""
        return False

    def enter(self, batch: Batch, forward: ForwardBatch) -> StoredDrafts | None:
        """Put drafts that only the device knows into a step's inputs; None where it has none of them."""
        return None

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

    def propose(
        self, sampled: list[ScheduledSequence], results: dict[int, SequenceResult], following: Batch | None
    ) -> None:
        """Tell the decoder what became of its drafts, and put new ones into the results."""


class Drafting(NoDrafting):
    """A decoder, the drafts it has made that are not verified yet, and the steps of its own model."""

    def __init__(  # noqa: PLR0913 - the parts of a worker that drafts are made with
        self,
        decoder: SpeculativeDecoder,
        table: SequenceTable,
        inputs: InputBuffers,
        attention: AttentionBackend,
        layers: list[AttentionLayer],
        sampling: SamplingPipeline,
        num_taps: int = 0,
        store: DraftStore | None = None,
        *,
        runs_ahead: bool = False,
    ) -> None:
        """num_taps: of the target that ``learn`` gets alongside its hidden states.

        store: keeps drafts on a device that is not the host until they are verified.
        """
        self._decoder = decoder
        self._store = store
        self.num_taps = num_taps
        self._table = table
        self._attention = attention
        self.layers = layers
        self._steps = (inputs, sampling)
        self._made: dict[int, Proposal] = {}
        self.max_drafts = decoder.max_drafts
        self.reads_hidden = decoder.reads_hidden
        self.runs_ahead = runs_ahead

    def enter(self, batch: Batch, forward: ForwardBatch) -> StoredDrafts | None:
        return None if self._store is None else self._store.enter(batch, forward)

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.replace(slot)
        if slots:
            self._decoder.forget(slots)

    def trees(self, sequences: Iterable[ScheduledSequence]) -> dict[int, DraftTree]:
        found: dict[int, DraftTree] = {}
        for scheduled in sequences:
            made = self._made.get(scheduled.slot) if scheduled.draft_token_ids else None
            if made is not None and made.parents is not None:
                found[scheduled.slot] = DraftTree(scheduled.draft_token_ids, made.parents)
        return found

    def has_hidden_trees(self, sequences: Iterable[ScheduledSequence]) -> bool:
        return self._store is not None and self._store.has_trees(sequences)

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
        if self._store is not None:
            self._store.drop(slot)

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
            layers = [layer for layer in self.layers if layer.kv_group == group]
            source = table.kv_slots(slot, first + np.array(path, np.int64), group)
            target = table.kv_slots(slot, first + np.arange(len(path)), group)
            self._attention.move(layers, send(source), send(target))

    def propose(
        self, sampled: list[ScheduledSequence], results: dict[int, SequenceResult], following: Batch | None
    ) -> None:
        if not sampled:
            return
        table, made = self._table, self._made
        slots = np.array([s.slot for s in sampled], np.int64)
        own = [s for s in sampled if s.slot in made]  # not those that others took the place of
        self._decoder.observe(
            Verified(
                np.array([s.slot for s in own], np.int64),
                np.array([len(s.draft_token_ids) for s in own], np.int64),
                np.array([len(results[s.slot].token_ids) - 1 for s in own], np.int64),
            )
        )
        undone = {s.slot for s in sampled if table.has_states and table.is_undone(s, results[s.slot].token_ids)}
        if undone:  # their next step computes what stands, and no drafts
            slots = np.array([slot for slot in slots.tolist() if slot not in undone], np.int64)
            if not len(slots):
                return
        coming: dict[int, list[int]] = {}  # what a step in flight verifies, by slot
        if following is not None and self.runs_ahead:
            coming = {s.slot: s.draft_token_ids for s in following.sequences}
        num_tokens = table.num_tokens[slots] - table.unknown[slots]
        room = np.minimum(table.num_blocks[slots] * table.block_size, table.token_ids.shape[1] - 1) - num_tokens
        most = np.clip(room, 0, self._decoder.max_drafts)
        steps = Steps(self.plan, *self._steps, slots, num_tokens)
        view = DraftView(slots, num_tokens, most, table.token_ids, steps)
        if coming:
            view.ahead = np.array([1 + len(coming[slot]) if slot in coming else 0 for slot in slots.tolist()], np.int64)
        drafts = self._decoder.propose(view)
        if coming:
            assert isinstance(drafts.token_ids, list), "a decoder that drafts ahead does so on the host"
            drafts.token_ids = [
                _after(tokens, coming[slot]) if slot in coming else tokens
                for slot, tokens in zip(slots.tolist(), drafts.token_ids, strict=True)
            ]
        stays = isinstance(drafts.token_ids, Tensor) and self._may_stay(slots, num_tokens, drafts)
        if stays and self._store is not None:
            for slot, count in zip(slots.tolist(), self._store.put(slots, drafts, most), strict=True):
                self._made[slot] = CERTAIN
                results[slot].draft_token_ids = [0] * count  # which the host learns when they are verified
        else:
            self._keep(slots, drafts, most, results)

    def _may_stay(self, slots: np.ndarray, num_tokens: np.ndarray, drafts: Drafts) -> bool:
        """Whether nothing needs to know drafts on the host before they are verified.

        What reads the text does, a test of probabilities, and a tree from which is sampled: the depths of its drafts
        say which random numbers are theirs.
        """
        rows = StepRows(slots, slots, num_tokens)
        if not self._decoder.acceptance.is_exact or self._steps[1].reads_history(rows):
            return False
        return drafts.parents is None or rows.sampling_state(self._table).all_greedy

    def _keep(self, slots: np.ndarray, drafts: Drafts, most: np.ndarray, results: dict[int, SequenceResult]) -> None:
        """Put drafts into the results, for the host to know."""
        token_ids, all_parents = on_host(drafts)
        listed = slots.tolist()
        if self._store is not None:
            self._store.drop_each(listed)
        if all_parents is None and drafts.probabilities is None:
            self._made.update(dict.fromkeys(listed, CERTAIN))
            for slot, tokens, count in zip(listed, token_ids, most.tolist(), strict=True):
                if tokens:
                    results[slot].draft_token_ids = tokens[:count]
            return
        start = 0
        for i, (slot, tokens) in enumerate(zip(listed, token_ids, strict=True)):
            end = start + len(tokens)
            parents = None if all_parents is None else all_parents[i]
            drawn = None if drafts.probabilities is None else drafts.probabilities[start:end]
            if parents is not None and drawn is not None:
                raise ValueError("a speculative decoder drew the drafts of a tree: only those of chains may be drawn")
            self._made[slot] = Proposal(parents, drawn)
            results[slot].draft_token_ids = tokens[: int(most[i])]
            start = end

    def plan(self, forward: ForwardBatch) -> ForwardBatch:
        """Make a batch ready for a forward pass."""
        forward.plan = self._attention.plan(forward, self.layers)
        return forward


def _after(tokens: list[int], verified: list[int]) -> list[int]:
    """The part of a continuation that follows a step in flight, if the continuation is right.

    Of the drafts that the step verifies those are then accepted which agree with it, and one token comes after them.
    """
    same = 0
    while same < min(len(tokens), len(verified)) and tokens[same] == verified[same]:
        same += 1
    return tokens[same + 1 :]
