"""How much of a prompt is computed in one step."""

from __future__ import annotations

from fwk.engine.admission import Admission
from fwk.engine.kv_block_manager import KVBlockManager
from fwk.engine.plan import Limits
from fwk.engine.sequence import Sequence


class Chunking:
    """Asks limits, the policy, features' parts and the KV cache."""

    def __init__(self, limits: Limits, kv_blocks: KVBlockManager, queue: Admission) -> None:
        self._limits = limits
        self._kv_blocks = kv_blocks
        self._queue = queue
        gap = limits.max_decode_gap
        self.pace = None if gap is None or limits.pace is None else limits.pace(gap)
        self._room = self._rest = 0

    def begin_step(self, num_decoding: int, budget: int, num_soon: int) -> None:
        """A step has ``budget`` tokens left beyond those that decode. num_soon: as of ``StepPace.room``."""
        self._room = budget if self.pace is None else self.pace.room(num_decoding, budget, num_soon)
        self._rest = budget - self._room  # that no prompt takes

    def end_step(self) -> None:
        """What pre-emption asks before the next step's prompts is not bound by this one's pace."""
        self._rest = 0

    def took(self, counts: tuple[int, int] | None, seconds: float) -> None:
        """A step took so long. counts: as of ``PlannedStep``."""
        if counts is not None and self.pace is not None:
            self.pace.took(*counts, seconds)

    def size(self, sequence: Sequence, remaining: int, budget: int) -> int:
        """How many of a sequence's remaining tokens to compute in a step; 0 if it must be all and that is too many."""
        if self._limits.whole_prompts:
            return remaining if remaining <= budget else 0
        paced = budget - self._rest
        if not self._rest or self._limits.max_chunk_tokens is None:
            return self._cut(sequence, remaining, budget)
        most = self._cut(sequence, remaining, paced) if paced > 0 else 0
        if most or paced < self._room:
            return most
        return self._cut(sequence, remaining, budget)  # the first of a step continues, whatever its parts ask for

    def _cut(self, sequence: Sequence, remaining: int, budget: int) -> int:
        start = len(sequence.token_ids) - remaining
        if self._limits.max_chunk_tokens is None:
            most = 0 if budget < remaining <= self._limits.max_step_tokens else min(remaining, budget)
            most = most if most == remaining else self._limited(sequence, start, most)
        else:
            room = min(remaining, budget, self._limits.max_chunk_tokens)
            most = self._limited(sequence, start, self._queue.policy.chunk(sequence, remaining, room))
            most = most or self._limited(sequence, start, room)  # a policy may say less than a part can begin with
        return self._kv_blocks.cut_chunk(sequence, start, most)

    @staticmethod
    def _limited(sequence: Sequence, start: int, most: int) -> int:
        for part in sequence.parts:
            most = max(0, min(most, part.limit(sequence, start, most)))
        return most
