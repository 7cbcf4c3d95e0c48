"""From logits to tokens: processors in their declared order, then the sampler."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fwk.errors import BlameSequence
from fwk.interfaces.sampling import LogitsProcessor, LogitsView, Sampler, SamplingRows
from fwk.types import NewSequence
from fwk.worker.inputs import StepRows
from fwk.worker.table import SequenceTable
from fwk.worker.verify import rejection_logits, uniform_draws

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Active:
    """A processor, and the slots that asked something of it."""

    processor: LogitsProcessor
    slots: set[int] = field(default_factory=set[int])


class SamplingPipeline:
    """All logits processors and the sampler of a worker."""

    def __init__(self, processors: list[LogitsProcessor], sampler: Sampler, table: SequenceTable) -> None:
        self._active = [_Active(processor) for processor in processors]
        self._ending = [a for a in self._active if type(a.processor).ends is not LogitsProcessor.ends]
        self._sampler = sampler
        self._table = table

    def add(self, new: NewSequence) -> None:
        """A sequence takes its slot. Raises ``BlameSequence`` when a processor cannot take its settings."""
        for active in self._active:
            if _add(active.processor, new):
                active.slots.add(new.slot)

    def remove(self, slot: int) -> None:
        """The sequence of a slot is gone."""
        for active in self._active:
            if slot in active.slots:
                active.slots.discard(slot)
                active.processor.remove(slot)

    def ends(self, slot: int, token_ids: list[int]) -> int | None:
        """How many of a step's tokens stand when the output is complete with them; None while it may go on."""
        for active in self._ending:
            if slot in active.slots:
                stand = _ends(active.processor, slot, token_ids)
                if stand is not None:
                    return stand
        return None

    def sample(self, logits: Tensor, rows: StepRows) -> list[int]:
        """Pick a token for each row of ``logits`` [num_rows, vocab_size]; -1 for a row no token can be picked for."""
        table = self._table
        in_step = set(rows.slots.tolist())
        asked = [(active.processor, active.slots) for active in self._active if not active.slots.isdisjoint(in_step)]
        is_greedy = table.is_greedy[rows.slots]
        all_greedy = bool(is_greedy.all())
        if asked or not all_greedy:
            logits = logits.to(torch.float32, copy=True)
        if asked:
            view = LogitsView(rows.slots, rows.num_tokens, table.num_prompt[rows.slots], table.token_ids)
            for processor, slots in asked:
                logits = _apply(processor, slots & in_step, logits, view)
        if rows.drawn and not all_greedy:
            logits = self._settle_drawn(logits, rows, is_greedy)
        picked = SamplingRows(is_greedy, table.seeds[rows.slots], rows.num_tokens.astype(np.int64), all_greedy)
        return self._sampler.sample(logits, picked).tolist()

    def _settle_drawn(self, logits: Tensor, rows: StepRows, is_greedy: np.ndarray) -> Tensor:
        """Keep or reject the drafts that a decoder drew itself; greedy rows simply compare."""
        keys = list(zip(rows.slots.tolist(), rows.num_tokens.tolist(), strict=True))
        at = [i for i, key in enumerate(keys) if key in rows.drawn and not is_greedy[i]]
        if not at:
            return logits
        found = [rows.drawn[keys[i]] for i in at]
        drafts = torch.tensor([draft for draft, _ in found], device=logits.device)
        proposal = torch.stack([q for _, q in found]).to(logits.device)
        draws = uniform_draws(self._table.seeds[rows.slots[at]], rows.num_tokens[at])
        index = torch.tensor(at, device=logits.device)
        rest = rejection_logits(logits[index], drafts, proposal, torch.from_numpy(draws).to(logits.device))
        return logits.index_copy(0, index, rest)


def _add(processor: LogitsProcessor, new: NewSequence) -> bool:
    """Whether a processor has something to do for a new sequence. Whatever it raises is that sequence's fault."""
    try:
        return processor.add(new.slot, new.sampling)
    except BlameSequence:
        raise
    except Exception as error:
        log.exception("logits processor %s raised", type(processor).__name__)
        raise BlameSequence(new.slot, f"logits processor {type(processor).__name__} failed") from error


def _apply(processor: LogitsProcessor, slots: set[int], logits: Tensor, view: LogitsView) -> Tensor:
    """Run a processor. Whatever it raises is the fault of one of those who asked for it."""
    try:
        return processor.apply(logits, view)
    except BlameSequence:
        raise
    except Exception as error:
        log.exception("logits processor %s raised", type(processor).__name__)
        slot = _culprit(processor, slots, logits, view)
        raise BlameSequence(slot, f"logits processor {type(processor).__name__} failed") from error


def _ends(processor: LogitsProcessor, slot: int, token_ids: list[int]) -> int | None:
    """Ask a processor whether an output is complete. Whatever it raises is that sequence's fault."""
    try:
        return processor.ends(slot, token_ids)
    except BlameSequence:
        raise
    except Exception as error:
        log.exception("logits processor %s raised", type(processor).__name__)
        raise BlameSequence(slot, f"logits processor {type(processor).__name__} failed") from error


def _culprit(processor: LogitsProcessor, slots: set[int], logits: Tensor, view: LogitsView) -> int:
    """The first slot for which the processor raises alone; when none does, the first of all."""
    for slot in sorted(slots):
        rows = np.flatnonzero(view.slots == slot)
        alone = LogitsView(view.slots[rows], view.num_tokens[rows], view.num_prompt_tokens[rows], view.token_ids)
        try:
            processor.apply(logits[torch.from_numpy(rows).to(logits.device)], alone)
        except Exception:
            return slot
    return min(slots)
