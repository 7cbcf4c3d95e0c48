"""A worker's side of a speculative decoder: asks for drafts, and keeps how they were made until verification."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fwk.interfaces.drafting import DraftingParts, Positions
from fwk.interfaces.speculative import Drafts, DraftView, SpeculativeDecoder, TargetStep, Verified
from fwk.interfaces.step import LaunchedStep, StepRows
from fwk.types import Batch, ForwardBatch, ScheduledSequence, SequenceResult
from fwk_speculative.drafting.chains import ChainDrafting
from fwk_speculative.drafting.draft_ahead import ComingDrafts, leave_after
from fwk_speculative.drafting.draft_steps import Steps
from fwk_speculative.drafting.draft_store import DraftStore, on_host
from fwk_speculative.drafting.draft_tree import DraftTree, positions_in_trees, tree_mask
from fwk_speculative.drafting.inputs import DraftInputs
from fwk_speculative.drafting.notes import LateRows, StepNotes
from fwk_speculative.drafting.part_drafts import NoPartDrafts
from fwk_speculative.drafting.running_ahead import RunningAhead


@dataclass(frozen=True, slots=True)
class Proposal:
    """How the drafts of one sequence were made; both None for a chain that was certain."""

    parents: list[int] | None
    probabilities: Tensor | None  # [num_drafts, vocab_size]


CERTAIN = Proposal(None, None)


class DecoderDrafting(ChainDrafting):
    """A decoder, the drafts it has made that are not verified yet, and the steps of its own model."""

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        parts: DraftingParts,
        of_parts: NoPartDrafts,
        ahead: RunningAhead,
        store: DraftStore | None = None,
        *,
        runs_ahead: bool = False,
    ) -> None:
        """runs_ahead: steps may be planned while drafts are in flight, as the decoder can.

        store: keeps drafts on a device that is not the host until they are verified.

        - ``max_levels``: most drafts of a sequence that are accepted in a step.
        - ``is_early``: sequences that run ahead are drafted for as soon as a step is launched.
        - ``moves_early``: they are drafted for when it is collected, and their drafts may be trees: at the launch only
          K/V of accepted paths are moved, which the next step reads.
        """
        super().__init__(parts, of_parts, ahead, decoder.acceptance)
        self._decoder = decoder
        self._store = store
        self.num_taps = parts.num_taps
        self._move, self.plan = parts.move, parts.plan
        self._inputs = DraftInputs(parts.table, parts.inputs)
        self._made: dict[int, Proposal] = {}
        self._coming: dict[int, list[int]] = {}  # by slot: parents of the newest tree of a sequence that runs ahead
        self._known: dict[int, DraftTree] = {}  # the trees of the step that is being prepared, by slot
        self.max_drafts, self.max_levels = decoder.max_drafts, decoder.max_levels
        self.reads_hidden = decoder.reads_hidden
        self.runs_ahead = runs_ahead
        self.is_early = runs_ahead and decoder.drafts_late
        self.moves_early = runs_ahead and decoder.drafts_trees and not decoder.drafts_late

    def begin(self, slot: int) -> None:
        if self.runs_ahead and self._may_run_ahead(slot):
            self.ahead.begin(slot)

    def _may_run_ahead(self, slot: int) -> bool:
        """Whether all that follows from the number of accepted drafts is done where that is known, on the device."""
        parts = self.table.parts_of(np.array([slot]))
        return (
            not any(part.needs_lengths for part in parts) and self._is_exact(slot) and self.sampling.may_be_late(slot)
        )

    def _is_exact(self, slot: int) -> bool:
        """Whether drafts of a slot are kept as the target would pick them."""
        return bool(self.table.is_greedy[slot]) or self._decoder.acceptance.is_exact

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.replace(slot)
        if slots:
            self.ahead.forget(slots)
            self._decoder.forget(slots)

    def trees(self, batch: Batch) -> Positions | None:
        found = self._known = dict[int, DraftTree]()
        for scheduled in batch.sequences:
            made = self._made.get(scheduled.slot) if scheduled.draft_token_ids else None
            if made is not None and made.parents is not None:
                found[scheduled.slot] = DraftTree(scheduled.draft_token_ids, made.parents)
        if found:
            return partial(positions_in_trees, trees=found)
        are_stored = self._store is not None and self._store.has_trees(batch.sequences)
        return _as_they_are if are_stored else None

    def enter(self, step: LaunchedStep, forward: ForwardBatch) -> None:
        notes = step.drafts = StepNotes(self._known)
        if self.runs_ahead:
            self.ahead.shorten(step, forward)
            step.num_ahead = self.ahead.drafts_in(step)
        if self._known:
            assert step.rows.plan is not None
            slots, num_new, _ = step.rows.plan
            forward.tree_mask = self._inputs.send(tree_mask(slots.tolist(), num_new.tolist(), self._known))
        if self._store is not None:
            draws = not step.rows.sampling_state(self.table).all_greedy
            notes.stored = self._store.enter(step.batch, forward, step.rows, draws=draws)
            step.numbers = None if notes.stored is None else notes.stored.numbers

    def computed(self, step: LaunchedStep, forward: ForwardBatch) -> None:
        self._decoder.follow(forward)
        notes = StepNotes.of(step)
        if self.is_early or (self.moves_early and notes.stored is not None):
            notes.late = LateRows.of(self.table, forward, step.rows, self._inputs.send)
            assert step.rows.plan is not None
            if step.hidden is not None and not self.ahead.slots[step.rows.plan[0]].all():
                # Some is read when the step is collected, and another was launched then.
                step.hidden = step.hidden.clone()

    def accept(self, step: LaunchedStep, picked: Tensor, newest: Tensor) -> None:
        self.ahead.accept(step, picked, newest)

    def chosen(self, step: LaunchedStep, picked: Tensor | None, newest: Tensor) -> None:
        if StepNotes.of(step).late is None:
            return
        assert step.rows.plan is not None
        both = self._inputs.send(np.stack((step.rows.plan[0], self.ahead.of_step(step))))
        newest, rejected = newest.index_select(0, both[0]), self.ahead.rejected.index_select(0, both[1])
        self.draft_early(step, newest if picked is None else picked, newest, rejected)

    def arrived(self, step: LaunchedStep, numbers: Tensor) -> None:
        notes = StepNotes.of(step)
        assert notes.stored is not None
        notes.trees |= notes.stored.learn(numbers)

    def settled(self, step: LaunchedStep, sampled: list[ScheduledSequence], results: dict[int, SequenceResult]) -> None:
        notes, following = StepNotes.of(step), step.following
        if step.hidden is not None:
            self.learn(step, step.hidden, results)
        going_on = [s for s in sampled if results[s.slot].goes_on]
        self.propose(going_on, results, None if following is None else following.batch)
        self.enter_parts(going_on, results)
        if notes.early:
            newer = {} if following is None else StepNotes.of(following).early
            for slot in (s.slot for s in going_on if s.slot in notes.early):  # those that come after the newest step
                results[slot].draft_token_ids = [0] * newer.get(slot, notes.early[slot])
        self.ahead.tell(results)

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
        self._coming.pop(slot, None)
        if self._store is not None:
            self._store.drop(slot)

    def learn(self, step: LaunchedStep, hidden: Tensor, results: dict[int, SequenceResult]) -> None:
        """Tell the decoder what the target computed of the tokens that stand; the table has taken them in.

        hidden: as ``StepModel.run`` returns it.
        """
        notes, forward_start = StepNotes.of(step), step.rows.query_start
        trees, computed = notes.trees, None if notes.late is None else notes.late.computed
        slots: list[int] = []
        rows: list[np.ndarray] = []
        chosen: list[int] = []
        for i, scheduled in enumerate(step.batch.sequences):
            slot, num_drafts = scheduled.slot, len(scheduled.draft_token_ids)
            result = results.get(slot)
            if self.is_early and self.ahead.slots[slot]:
                continue
            if result is not None and (not result.goes_on or self.table.is_undone(scheduled, result.token_ids)):
                continue
            first, end = int(forward_start[i]), int(forward_start[i + 1])
            known = np.arange(first, end - num_drafts)
            num_kept = len(result.token_ids) - 1 if result is not None and scheduled.samples else 0
            kept = np.array(trees[slot].path[:num_kept], np.int64) if slot in trees else np.arange(num_kept)
            slots.append(slot)
            chosen.append(i)
            rows.append(np.concatenate((known, end - num_drafts + kept)))
        if slots:
            where = np.array(slots, np.int64)
            counts = np.array([len(some) for some in rows], np.int64)
            ends = self.table.num_computed[where] if computed is None else computed[chosen] + counts
            self._decoder.learn(self._step(where, rows, hidden, ends))

    def draft_early(self, step: LaunchedStep, picked: Tensor, newest: Tensor, rejected: Tensor) -> None:
        """Move K/V of accepted paths of the sequences that run ahead, and draft for them.

        picked: [num_rows] int64; newest, rejected: [num_seqs] int64, each one's newest token and how many of its
        drafts in this step were rejected.
        """
        notes = StepNotes.of(step)
        assert step.rows.plan is not None
        assert notes.late is not None
        slots, num_new, samples = step.rows.plan
        is_mine = self.ahead.slots[slots]
        if not is_mine.any():
            return
        started = time.perf_counter()
        send, places = self._inputs.send, np.flatnonzero(is_mine)
        if notes.late.order is not None:
            self._keep_early(step, notes.late, notes.late.order)
        if not self.is_early:
            return
        if step.hidden is not None:
            self._learn_early(step, step.hidden, places, picked, rejected)
        places = np.flatnonzero(is_mine & samples)
        if len(places):
            slots = slots[places]
            at = send(places)
            num_tokens = notes.late.computed[places] + num_new[places] + 1
            fewer = notes.late.num_fewer.index_select(0, at) + rejected.index_select(0, at)
            most = self._most(slots, num_tokens)
            steps = Steps(self.plan, self._inputs, self.sampling, slots, num_tokens, fewer, 2 * self.max_drafts)
            view = DraftView(slots, num_tokens, most, self.table.token_ids, steps)
            view.newest, view.namespaces = newest.index_select(0, at), self.table.namespaces
            drafts = self._decoder.propose(view)
            counts = [0] * len(slots)
            if isinstance(drafts.token_ids, Tensor):
                assert self._store is not None
                counts = self._store.put(slots, drafts, most)
            self._made.update(dict.fromkeys(slots.tolist(), CERTAIN))
            notes.early = dict(zip(slots.tolist(), counts, strict=True))
        step.drafting = time.perf_counter() - started

    def _keep_early(self, step: LaunchedStep, late: LateRows, order: Tensor) -> None:
        """``keep`` of all trees of sequences that run ahead, as far down as a path can go: only the device knows it."""
        assert step.num_ahead is not None
        chosen = np.flatnonzero(step.num_ahead)
        counts = step.num_ahead[chosen]
        begin, counts = step.rows.query_start[chosen + 1] - counts, np.minimum(counts, self.max_levels)
        target = self._inputs.send(np.repeat(begin - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum()))
        source = order.index_select(0, target)
        for group, places in enumerate(late.kv_places):
            self._move(group, places.index_select(0, source), places.index_select(0, target))

    def _learn_early(
        self, step: LaunchedStep, hidden: Tensor, places: np.ndarray, picked: Tensor, rejected: Tensor
    ) -> None:
        """``learn`` of the sequences at ``places`` of a step, all of their rows: only the device knows which stand."""
        rows, late, table, send = step.rows, StepNotes.of(step).late, self.table, self._inputs.send
        assert rows.plan is not None
        assert late is not None
        slots, num_new, _ = rows.plan
        begin = rows.query_start
        counts = num_new[places]
        starts = np.zeros(len(places) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        owner = np.repeat(np.arange(len(places)), counts)
        together = np.arange(starts[-1]) + (begin[places] - starts[:-1])[owner]
        # The token after each: what is known of a prompt, then what was picked.
        after = np.minimum(late.computed[places][owner] + np.arange(starts[-1]) - starts[:-1][owner] + 1,
                           table.token_ids.shape[1] - 1)  # fmt: skip
        known = table.token_ids[slots[places][owner], after].astype(np.int64)
        row_of = np.full(int(begin[-1]), -1, np.int64)  # of the logits, for each token of the step
        row_of[_row_tokens(rows)] = np.arange(len(rows.slots))
        at = send(np.stack((together, known, row_of[together])))
        tokens, order = at[1], late.order
        if order is not None:  # a draft's row is as far from its token as those of its sequence's others
            moved = order.index_select(0, at[0])
            at[2] += moved - at[0]
            at[0] = moved
        if len(rows.slots):
            tokens = torch.where(at[2] < 0, tokens, picked.index_select(0, at[2].clamp(min=0)))
        ends = send(np.stack((places, starts[1:] - 1)))
        fewer, last = late.num_fewer.index_select(0, ends[0]), ends[1] - rejected.index_select(0, ends[0])
        stays = order is None and len(together) == hidden.shape[0]
        hidden = hidden if stays else hidden.index_select(0, at[0])
        own, *taps = hidden.chunk(1 + self.num_taps, 1)

        def batch() -> ForwardBatch:
            first = late.computed[places]
            return self.plan(self._inputs.prepare_next_late(slots[places], tokens, first, starts, fewer, last))

        self._decoder.learn(TargetStep(slots[places], starts, own, tuple(taps), batch, last))

    def _step(self, slots: np.ndarray, rows: list[np.ndarray], hidden: Tensor, ends: np.ndarray) -> TargetStep:
        counts = np.array([len(some) for some in rows], np.int64)
        starts = np.zeros(len(slots) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        together = np.concatenate(rows)
        if len(together) != hidden.shape[0]:
            hidden = hidden.index_select(0, self._inputs.send(together))
        own, *taps = hidden.chunk(1 + self.num_taps, 1)

        def batch() -> ForwardBatch:
            positions = np.arange(starts[-1]) - np.repeat(starts[1:] - ends, counts)
            return self.plan(self._inputs.prepare_next(slots, positions, starts, ends))

        return TargetStep(slots, starts, own, tuple(taps), batch, self._inputs.send(starts[1:] - 1))

    def keep(self, slot: int, path: list[int]) -> None:
        if path == list(range(len(path))):
            return
        table = self.table
        first = int(table.num_tokens[slot])
        send = self._inputs.send
        for group in range(len(table.block_tables)):
            source = table.kv_slots(slot, first + np.array(path, np.int64), group)
            target = table.kv_slots(slot, first + np.arange(len(path)), group)
            self._move(group, send(source), send(target))

    def propose(
        self, sampled: list[ScheduledSequence], results: dict[int, SequenceResult], following: Batch | None
    ) -> None:
        """Tell the decoder what became of its drafts, and put new ones into the results."""
        if not sampled:
            return
        table, made = self.table, self._made
        own = [s for s in sampled if s.slot in made]  # not those that others took the place of
        self._decoder.observe(
            Verified(
                np.array([s.slot for s in own], np.int64),
                np.array([len(s.draft_token_ids) for s in own], np.int64),
                np.array([len(results[s.slot].token_ids) - 1 for s in own], np.int64),
            )
        )
        slots = self._left(sampled, results)
        if not len(slots):
            return
        coming: dict[int, ComingDrafts] = {}  # what a step in flight verifies, by slot
        if following is not None and self.runs_ahead and not self.is_early:
            coming = {s.slot: ComingDrafts(s.draft_token_ids, self._coming.get(s.slot)) for s in following.sequences}
        num_tokens = table.num_tokens[slots] - table.unknown[slots]
        most = self._most(slots, num_tokens)
        steps = Steps(self.plan, self._inputs, self.sampling, slots, num_tokens)
        view = DraftView(slots, num_tokens, most, table.token_ids, steps, namespaces=table.namespaces)
        if coming:
            levels = [1 + coming[slot].num_levels if slot in coming else 0 for slot in slots.tolist()]
            view.ahead = np.array(levels, np.int64)
        drafts = self._decoder.propose(view)
        if coming:
            leave_after(drafts, [coming.get(slot) for slot in slots.tolist()])
        if self.moves_early:
            slots, drafts, most = self._store_trees(slots, drafts, most, results)
        stays = isinstance(drafts.token_ids, Tensor) and self._may_stay(slots, num_tokens, drafts)
        if stays and self._store is not None:
            for slot, count in zip(slots.tolist(), self._store.put(slots, drafts, most), strict=True):
                self._made[slot] = CERTAIN
                results[slot].draft_token_ids = [0] * count  # which the host learns when they are verified
        else:
            self._keep(slots, drafts, most, results)

    def _store_trees(
        self, slots: np.ndarray, drafts: Drafts, most: np.ndarray, results: dict[int, SequenceResult]
    ) -> tuple[np.ndarray, Drafts, np.ndarray]:
        """Keep trees of the sequences that run ahead where their paths are found, on the device.

        Returns slots, drafts and ``most`` of the others.
        """
        tokens, parents = drafts.token_ids, drafts.parents
        assert isinstance(tokens, list)
        assert not isinstance(parents, Tensor)
        assert self._store is not None, "steps run ahead on a device alone"
        for slot in slots.tolist():
            self._coming.pop(slot, None)
        is_mine = self.ahead.slots[slots]
        if parents is None or not is_mine.any():
            return slots, drafts, most
        mine, rest = np.flatnonzero(is_mine).tolist(), np.flatnonzero(~is_mine).tolist()
        counts = self._store.put_trees(slots[mine], [tokens[i] for i in mine], [parents[i] for i in mine], most[mine])
        for i, count in zip(mine, counts, strict=True):
            slot = int(slots[i])
            self._made[slot], self._coming[slot] = CERTAIN, parents[i]
            results[slot].draft_token_ids = tokens[i][:count]
        return slots[rest], Drafts([tokens[i] for i in rest], [parents[i] for i in rest]), most[rest]

    def _left(self, sampled: list[ScheduledSequence], results: dict[int, SequenceResult]) -> np.ndarray:
        """Slots of the sequences to draft for.

        Not of those for which that was done early, nor of those whose step is undone: their next one computes what
        stands, and no drafts.
        """
        table = self.table
        slots = np.array([s.slot for s in sampled], np.int64)
        if self.is_early:
            slots = slots[~self.ahead.slots[slots]]
        undone = {s.slot for s in sampled if table.has_states and table.is_undone(s, results[s.slot].token_ids)}
        return np.array([slot for slot in slots.tolist() if slot not in undone], np.int64) if undone else slots

    def _most(self, slots: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Drafts that there is room for after so many tokens: [num_seqs] each."""
        table = self.table
        room = np.minimum(table.num_blocks[slots] * table.block_size, table.token_ids.shape[1] - 1) - num_tokens
        return np.clip(room, 0, self._decoder.max_drafts)

    def _may_stay(self, slots: np.ndarray, num_tokens: np.ndarray, drafts: Drafts) -> bool:
        """Whether nothing needs to know drafts on the host before they are verified.

        What reads the text does, a test of probabilities, and of a tree what depends on the depths of its drafts: only
        the device knows how many tokens come before each.
        """
        rows = StepRows(slots, slots, num_tokens)
        if not self._decoder.acceptance.is_exact or self.sampling.reads_history(rows):
            return False
        return drafts.parents is None or all(map(self.sampling.takes_places_late, slots.tolist()))

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
            self._made[slot] = Proposal(parents, drawn)
            results[slot].draft_token_ids = tokens[: int(most[i])]
            start = end


def _as_they_are(positions: np.ndarray, slots: np.ndarray, starts: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
    """Positions of trees that only the device knows: it changes them."""
    return positions


def _row_tokens(rows: StepRows) -> np.ndarray:
    """Which of a step's tokens each row of its logits comes from: [num_rows] int64."""
    assert rows.plan is not None
    counts = np.bincount(rows.sequences, minlength=len(rows.plan[0]))
    nth = np.arange(len(rows.sequences)) - (np.cumsum(counts) - counts)[rows.sequences]
    return (rows.query_start[1:] - counts)[rows.sequences] + nth
