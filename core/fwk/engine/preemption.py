"""Running sequences that give their blocks to others, and start over later."""

from __future__ import annotations

from collections.abc import Callable

from fwk.engine.admission import Admission
from fwk.engine.blocks import OutOfBlocks
from fwk.engine.chunking import Chunking
from fwk.engine.kv_block_manager import KVBlockManager
from fwk.engine.plan import Limits, StepPlan
from fwk.engine.sequence import Sequence, Status
from fwk.interfaces.schedule import SchedulerView


class Preemption:
    """Makes room for those that run, and for those that the policy prefers to them.

    running, free_slots: the scheduler's, as it changes them. release: takes blocks and slot of a running sequence.
    """

    def __init__(
        self,
        limits: Limits,
        kv_blocks: KVBlockManager,
        queue: Admission,
        chunking: Chunking,
        view: SchedulerView,
        running: list[Sequence],
        free_slots: list[int],
        release: Callable[[Sequence], None],
    ) -> None:
        self._limits = limits
        self._kv_blocks = kv_blocks
        self._queue = queue
        self._chunking = chunking
        self._view = view
        self._running = running
        self._free_slots = free_slots
        self._release = release
        self.count = 0
        """Sequences that were pre-empted."""

    def make_room(self, sequence: Sequence, num_new: int, plan: StepPlan) -> list[int] | None:
        """Blocks for ``num_new`` more tokens, taken from those behind it if need be; None when it has to wait.

        No sequence takes blocks from one that stands before it, and one that waits keeps its own. So the first runs in
        every step but those in which other running ones need no blocks, and the engine cannot thrash for ever.
        """
        self._kv_blocks.trim(sequence)
        count = self._kv_blocks.num_missing(sequence, sequence.num_computed_tokens + num_new, len(sequence.blocks))
        while True:
            try:
                return self._kv_blocks.extend(sequence, count)
            except OutOfBlocks:
                plan.is_short = True
                behind = self._running[self._running.index(sequence) + 1 :]
                # Whoever is already in the plan stays: its blocks may be shared with others of this step.
                candidates = [other for other in behind if other not in plan.scheduled]
                if not candidates:
                    return None
                victim = self._queue.policy.victim("victim", candidates)
                if not isinstance(victim, Sequence) or victim not in candidates:
                    victim = candidates[-1]
                self.preempt(victim)

    def displace(self) -> None:
        """Let the policy pre-empt running sequences until the first waiting one fits alongside the rest."""
        sequence = next(self._queue.candidates(), None)
        while sequence is not None and self._running and not self._fits(sequence):
            victim = self._queue.policy.victim("choose_preemption_victim", sequence, list(self._running))
            if not isinstance(victim, Sequence) or victim not in self._running:
                return
            self.preempt(victim)

    def _fits(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence could start in this step, if the running ones do what they have to do."""
        budget = self._limits.max_step_tokens
        for other in self._running:
            rest = other.num_uncomputed_tokens
            budget -= 1 if other.is_decoding else self._chunking.size(other, rest, max(budget, 1))
        if budget <= 0 or not self._free_slots:
            return False
        match = self._kv_blocks.match(sequence)
        num_new = self._chunking.size(sequence, len(sequence.token_ids) - match.num_tokens, budget)
        count = self._kv_blocks.num_missing(sequence, match.num_tokens + num_new, len(match.block_ids))
        return num_new > 0 and count + self._view.num_reserved_blocks <= self._kv_blocks.num_available

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks; it starts over from what the prefix cache still holds when it is back.

        Tokens of launched steps that have not come back are computed again: the same ones, for a pick depends on
        nothing but logits, seed and position.
        """
        self.count += 1
        for part in sequence.parts:
            part.preempted(sequence)
        self._release(sequence)
        self._running.remove(sequence)
        sequence.status = Status.WAITING
        sequence.num_preemptions += 1
        sequence.num_computed_tokens = 0
        sequence.num_pending = 0
        sequence.quiet_until = 0
        sequence.drafts = []
        sequence.has_drafts_in_flight = False
        self._queue.push(sequence)
