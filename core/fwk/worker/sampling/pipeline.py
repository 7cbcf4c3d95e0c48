"""From logits to tokens: processors in their declared order, then the sampler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fwk.errors import BlameSequence, PluginFault, one_line_traceback
from fwk.interfaces.device import Upload
from fwk.interfaces.sampling import LogitsProcessor, LogitsView, Sampler, SamplingRows
from fwk.interfaces.step import StepRows
from fwk.types import NewSequence
from fwk.worker.runner.sequence_table import SequenceTable

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a processor stands among the others, and what it is called."""

    order: int
    name: str


@dataclass(slots=True)
class _Active:
    """A processor, and the slots that asked something of it. One that is not current is kept for these alone."""

    place: Place
    processor: LogitsProcessor
    slots: set[int] = field(default_factory=set[int])
    is_current: bool = True


def num_finished(processors: list[str], finishes: tuple[str, ...]) -> int:
    """How many of the last processors, by name in order, a sampler takes over: all that it ``finishes``, or none."""
    return len(finishes) if set(processors[len(processors) - len(finishes) :]) == set(finishes) else 0


class SamplingPipeline:
    """All logits processors and the sampler of a worker.

    finishes: the sampler does the work of the processors of these names itself, while they are the last.

    late_positions: the sampler's own word (``SamplerSpec``).
    """

    def __init__(
        self,
        processors: Mapping[Place, LogitsProcessor],
        sampler: Sampler,
        table: SequenceTable,
        finishes: tuple[str, ...] = (),
        *,
        late_positions: bool = False,
    ) -> None:
        self._finishes = finishes
        self._late_positions = late_positions
        self._active: list[_Active] = []
        self._first: list[_Active] = []
        self._last: list[_Active] = []
        self._ending: list[_Active] = []
        self._arrange([_Active(place, processor) for place, processor in processors.items()])
        self._sampler = sampler
        self.send = sampler.context.send
        self._causes: list[str] = []  # of refusals found on a device
        self._table = table

    def switch(self, place: Place, processor: LogitsProcessor | None) -> None:
        """Use a processor for the sequences to come, in place of the one of that name; None: use none.

        Sequences under way keep what they started with, so nothing in the middle of one changes.
        """
        for active in self._active:
            if active.place.name == place.name:
                active.is_current = False
        added = [_Active(place, processor)] if processor is not None else []
        self._arrange([*self._active, *added])

    def close(self) -> None:
        """No sequence comes any more."""
        for active in self._active:
            active.processor.close()

    def _arrange(self, every: list[_Active]) -> None:
        """Put processors in their order, without those that no sequence needs any more."""
        for active in every:
            if not active.is_current and not active.slots:
                active.processor.close()
        kept = [active for active in every if active.is_current or active.slots]
        self._active = sorted(kept, key=lambda active: (active.place.order, active.place.name))
        self._ending = [active for active in self._active if _has_ends(active.processor)]
        names = [active.place.name for active in self._active]
        num_first = len(names) - num_finished(names, self._finishes)
        if not set(self._finishes).isdisjoint(names[:num_first]):  # one of them is being exchanged
            num_first = len(names)
        self._first, self._last = self._active[:num_first], self._active[num_first:]

    def add(self, new: NewSequence) -> None:
        """A sequence takes its slot. Raises ``BlameSequence`` when a processor cannot take its settings."""
        for active in self._active:
            if active.is_current and _add(active.processor, new):
                active.slots.add(new.slot)
        self._sampler.add(new.slot, new.sampling)

    def remove(self, slot: int) -> None:
        """The sequence of a slot is gone."""
        is_over = False
        for active in self._active:
            if slot in active.slots:
                active.slots.discard(slot)
                active.processor.remove(slot)
                is_over |= not active.is_current and not active.slots
        if is_over:
            self._arrange(self._active)

    def takes_places_late(self, slot: int) -> bool:
        """Whether tokens of a slot are the right ones where the device alone knows how many come before them."""
        if not self._table.is_greedy[slot] and not self._late_positions:
            return False
        return not any(slot in active.slots and active.processor.reads_places for active in self._active)

    def may_be_late(self, slot: int) -> bool:
        """Whether the device chooses the tokens of a slot before the host knows those that come before them."""
        asked = [active.processor for active in self._active if slot in active.slots]
        return self.takes_places_late(slot) and not any(x.reads_history or _has_ends(x) for x in asked)

    def ends(self, slot: int, token_ids: list[int]) -> int | None:
        """How many of a step's tokens stand when the output is complete with them; None while it may continue."""
        for active in self._ending:
            if slot in active.slots:
                stand = _ends(active.processor, slot, token_ids)
                if stand is not None:
                    return stand
        return None

    def ends_each(self, slots: list[int], token_ids: list[int]) -> dict[int, int | BlameSequence]:
        """``ends`` of slots [n] that gained a token each: of those whose output is complete, or that a processor
        blames."""
        found: dict[int, int | BlameSequence] = {}
        for active in self._ending:
            if not active.slots:
                continue
            told = {x: token for x, token in zip(slots, token_ids, strict=True) if x in active.slots and x not in found}
            try:
                ended = active.processor.ends_each(list(told), list(told.values()))
                if not ended.keys() <= told.keys():
                    raise ValueError(f"ends_each told of slots {sorted(ended.keys() - told.keys())}, not asked about")
            except Exception as error:  # of one call for all, which says not whose fault it is
                ended = dict.fromkeys(told, error)
            for slot, end in ended.items():
                found[slot] = end if isinstance(end, int) else _blamed(active.processor, slot, end)
        return found

    def may_end(self, slots: frozenset[int]) -> bool:
        """Whether ``ends`` may say so of one of these slots."""
        return any(not slots.isdisjoint(active.slots) for active in self._ending)

    def is_greedy(self, rows: StepRows) -> bool:
        """Whether no logit matters but the largest of each row."""
        choices = rows.sampling_state(self._table)
        return choices.all_greedy and not choices.wants_logprobs and not _asked(self._first, rows)

    def choose(self, logits: Tensor, rows: StepRows) -> Tensor:
        """Pick a token for each row of ``logits`` [num_rows, vocab_size]; one below 0 where none can be picked.

        [num_rows] int64 where the logits are, valid until the next call.
        """
        return self._pick(logits, rows)

    def reads_history(self, rows: StepRows) -> bool:
        """Whether a processor that a row asks for must see every token before it on the host."""
        return any(active.processor.reads_history for active in _asked(self._active, rows))

    def pick(self, logits: Tensor, rows: StepRows, failed: dict[int, BlameSequence]) -> Tensor:
        """Pick a token for each row but those of ``failed`` slots: [num_rows] int64, valid until the next call.

        Below 0 for a row without a token; ``refusal`` says why. A sequence that a processor blames is added to
        ``failed``, and the others are sampled without it. Does not wait for the device.
        """
        good = np.flatnonzero(~np.isin(rows.slots, list(failed))) if failed else None
        while True:
            if good is None:
                part_logits, part = logits, rows
            elif not len(good):
                return torch.full((len(rows.slots),), -1, device=logits.device)
            else:
                index = self.send(good)
                part_logits, part = logits.index_select(0, index), rows.take(good, index)
            try:
                tokens = self._pick(part_logits, part)
            except BlameSequence as error:
                if error.slot not in part.slots:
                    raise RuntimeError(f"slot {error.slot} is blamed, but has no part in this step: {error}") from error
                failed[error.slot] = error
                good = np.flatnonzero(~np.isin(rows.slots, list(failed)))
                continue
            if good is None:
                return tokens
            return torch.full((len(rows.slots),), -1, device=logits.device).index_copy_(0, self.send(good), tokens)

    def sample_valid(self, logits: Tensor, rows: StepRows, failed: dict[int, BlameSequence]) -> list[int]:
        """As ``pick``, and waits for the tokens."""
        return self.pick(logits, rows, failed).tolist()

    def refusal(self, slot: int, token: int) -> BlameSequence:
        """Why this, which is below 0, was picked for a sequence."""
        if token == -1:
            return BlameSequence(slot, "no token could be chosen: the logits are not numbers, or none is allowed")
        return BlameSequence(slot, self._causes[-2 - token], is_refusal=True)

    def _pick(self, logits: Tensor, rows: StepRows) -> Tensor:
        choices = rows.sampling_state(self._table)
        is_greedy, all_greedy = choices.is_greedy, choices.all_greedy
        refusals: list[tuple[Tensor, str]] = []
        logits = self._process(self._first, logits, rows, refusals)
        unfinished: np.ndarray | None = None
        if self._last and not all_greedy:
            unfinished = np.where(is_greedy, -1, rows.slots)
        decide: Callable[[Tensor], Tensor] | None = None
        if rows.drawn is not None and not all_greedy:
            logits, settled, decide = rows.drawn.settle(logits, rows, is_greedy, partial(self._finished, logits, rows))
            if unfinished is not None:
                unfinished[settled] = -1
        how = SamplingRows(
            is_greedy, choices.seeds, rows.num_tokens, all_greedy, unfinished, rows.num_fewer, rows.most_fewer
        )
        picked = self._sampler.sample(logits, how)
        if decide is not None:
            picked = decide(picked)
        for is_empty, cause in refusals:
            picked = torch.where(is_empty & (picked == -1), self._code(cause), picked)
        return picked

    def _code(self, cause: str) -> int:
        """What stands for a token where this is why there is none: -2 and less."""
        if cause not in self._causes:
            self._causes.append(cause)
        return -2 - self._causes.index(cause)

    def _process(
        self,
        processors: list[_Active],
        logits: Tensor,
        rows: StepRows,
        refusals: list[tuple[Tensor, str]] | None = None,
    ) -> Tensor:
        """Run those processors that a row asks for, on a copy of the logits in float32 if one is needed.

        refusals: gets what they note (``LogitsView.refusals``).
        """
        asked = _asked(processors, rows)
        if not asked:
            return logits
        in_step = rows.slot_set
        if rows.sampling_state(self._table).wants_logprobs or not all(a.processor.only_masks for a in asked):
            logits = logits.to(torch.float32, copy=True)
        view = self._view(rows)
        for active in asked:
            logits = _apply(active.processor, active.slots & in_step, logits, view, self.send)
        if refusals is not None:
            refusals += view.refusals
        return logits

    def _view(self, rows: StepRows) -> LogitsView:
        table, slots = self._table, rows.slots
        return LogitsView(
            slots,
            rows.num_tokens,
            table.num_prompt[slots],
            table.token_ids,
            table.seeds[slots],
            has_drafts=rows.has_drafts,
        )

    def _finished(self, logits: Tensor, rows: StepRows, some: np.ndarray, index: Tensor) -> Tensor:
        """Logits of some rows after all processors; index: the rows on the device."""
        return self._process(self._last, logits.index_select(0, index), rows.take(some, index))


def _has_ends(processor: LogitsProcessor) -> bool:
    """Whether it has a word on when outputs end."""
    return type(processor).ends is not LogitsProcessor.ends


def _asked(processors: list[_Active], rows: StepRows) -> list[_Active]:
    """Those of which a sequence of the step asks something."""
    if not any(active.slots for active in processors):
        return []
    in_step = rows.slot_set
    return [active for active in processors if not active.slots.isdisjoint(in_step)]


def _why(processor: LogitsProcessor, error: Exception) -> str:
    return str(error) if isinstance(error, PluginFault) else f"logits processor {type(processor).__name__} failed"


def _tell(processor: LogitsProcessor, error: Exception) -> None:
    log.error("logits processor %s raised: %s; one request ends", type(processor).__name__, one_line_traceback(error))
    log.debug("what it raised", exc_info=error)


def _add(processor: LogitsProcessor, new: NewSequence) -> bool:
    """Whether a processor has something to do for a new sequence. Whatever it raises is that sequence's fault."""
    try:
        return processor.add(new.slot, new.sampling)
    except BlameSequence:
        raise
    except Exception as error:
        _tell(processor, error)
        raise BlameSequence(new.slot, _why(processor, error)) from error


def _apply(processor: LogitsProcessor, slots: Set[int], logits: Tensor, view: LogitsView, send: Upload) -> Tensor:
    """Run a processor. Whatever it raises is the fault of one of those who asked for it."""
    try:
        return processor.apply(logits, view)
    except BlameSequence:
        raise
    except Exception as error:
        _tell(processor, error)
        slot = _culprit(processor, slots, logits, view, send)
        raise BlameSequence(slot, _why(processor, error)) from error


def _ends(processor: LogitsProcessor, slot: int, token_ids: list[int]) -> int | None:
    """Ask a processor whether an output is complete. Whatever it raises is that sequence's fault."""
    try:
        return processor.ends(slot, token_ids)
    except BlameSequence:
        raise
    except Exception as error:
        raise _blamed(processor, slot, error) from error


def _blamed(processor: LogitsProcessor, slot: int, error: Exception) -> BlameSequence:
    """What a processor raised for a slot, as that sequence's fault."""
    if isinstance(error, BlameSequence) and error.slot == slot:
        return error
    _tell(processor, error)
    return BlameSequence(slot, _why(processor, error))


def _culprit(processor: LogitsProcessor, slots: Set[int], logits: Tensor, view: LogitsView, send: Upload) -> int:
    """The first slot for which the processor raises alone; when none does, the first of all."""
    for slot in sorted(slots):
        rows = np.flatnonzero(view.slots == slot)
        seeds = None if view.seeds is None else view.seeds[rows]
        alone = LogitsView(view.slots[rows], view.num_tokens[rows], view.num_prompt_tokens[rows], view.token_ids, seeds)
        try:
            processor.apply(logits.index_select(0, send(rows)), alone)
        except Exception:
            return slot
    return min(slots)
