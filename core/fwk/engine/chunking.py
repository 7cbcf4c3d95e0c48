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

    def size(self, sequence: Sequence, remaining: int, budget: int) -> int:
        """How many of a sequence's remaining tokens to compute in a step; 0 if it must be all and that is too many."""
        if self._limits.whole_prompts:
            return remaining if remaining <= budget else 0
        if self._limits.max_chunk_tokens is None:
            most = 0 if budget < remaining <= self._limits.max_step_tokens else min(remaining, budget)
        else:
            most = min(remaining, budget, self._limits.max_chunk_tokens)
            most = self._queue.policy.chunk(sequence, remaining, most)
            for part in sequence.parts:
                most = max(1, min(most, part.limit(sequence, len(sequence.token_ids) - remaining, most)))
        return self._kv_blocks.cut_chunk(sequence, len(sequence.token_ids) - remaining, most)
