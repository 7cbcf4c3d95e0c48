"""A worker's lasting memory of its sequences: one row per slot, updated in place."""

from __future__ import annotations

import numpy as np

from fwk.errors import BlameSequence
from fwk.features.worker import WorkerFeatures
from fwk.interfaces.feature import WorkerPart
from fwk.interfaces.step import SamplingState
from fwk.types import Batch, NewSequence, ScheduledSequence


class SequenceTable:
    """Tokens, blocks and counts of every sequence a worker knows. Per-step inputs are built from it.

    A worker appends the tokens it samples itself, so that the plan of the next step need not carry them.
    """

    def __init__(
        self, num_slots: int, max_model_len: int, block_size: int, num_groups: int = 1, *, has_states: bool = False
    ) -> None:
        """has_states: of recurrent layers; a step with a rejected draft then counts as not computed at all."""
        self.block_size = block_size
        self.has_states = has_states
        # np.zeros maps memory lazily: rows that are never used cost nothing. One place more than the longest
        # sequence, for a token sampled by a step that turns out to be one too many.
        self.token_ids = np.zeros((num_slots, max_model_len + 1), np.int32)
        width = -(-max_model_len // block_size)
        # By KV group. The last row is nobody's: of rows of a step that stand for no sequence (``null_slot``).
        self.block_tables = [np.zeros((num_slots + 1, width), np.int32) for _ in range(num_groups)]
        self.null_slot = num_slots
        self.num_blocks = np.zeros(num_slots, np.int64)
        self.num_tokens = np.zeros(num_slots, np.int64)
        self.unknown = np.zeros(num_slots, np.int64)  # newest tokens that only the device knows yet
        self.num_computed = np.zeros(num_slots, np.int64)
        self.num_prompt = np.zeros(num_slots, np.int64)
        self.num_encoder = np.zeros(num_slots + 1, np.int64)  # leading tokens of a prompt, which an encoder reads
        self.is_greedy = np.ones(num_slots, bool)
        self.seeds = np.zeros(num_slots, np.uint64)
        self.namespaces = [""] * num_slots
        self.logprobs = np.full(num_slots, -1, np.int64)  # top tokens to report; -1: none at all
        self.features = np.zeros(num_slots, np.int64)  # those with a part in it: ``WorkerFeatures.bits``
        self.parts = WorkerFeatures()

    def add(self, new: NewSequence) -> None:
        """A sequence takes its slot."""
        slot, tokens = new.slot, new.token_ids
        self.token_ids[slot, : len(tokens)] = tokens
        self.num_tokens[slot] = len(tokens)
        self.unknown[slot] = 0
        self.num_prompt[slot] = new.num_prompt_tokens
        self.num_computed[slot] = new.num_computed_tokens
        self.num_blocks[slot] = 0
        self.append_blocks(slot, new.block_ids, new.window_block_ids)
        sampling = new.sampling
        self.is_greedy[slot] = sampling.temperature == 0.0
        self.seeds[slot] = new.seed
        self.namespaces[slot] = new.cache_namespace
        self.num_encoder[slot] = new.num_encoder_tokens
        self.logprobs[slot] = -1 if sampling.logprobs is None else sampling.logprobs
        self.features[slot] = self.parts.bits(new)

    def begin_features(self, new: NewSequence) -> None:
        """Features' parts begin with a sequence. Raises ``BlameSequence``: then none has a part in it."""
        try:
            self.parts.begin(new)
        except BlameSequence:
            self.features[new.slot] = 0
            raise

    def forget_features(self, slot: int) -> None:
        """A sequence has left its slot."""
        self.parts.forget(slot, int(self.features[slot]))
        self.features[slot] = 0

    def parts_of(self, slots: np.ndarray) -> tuple[WorkerPart, ...]:
        """The parts of features in the sequences in ``slots`` [n]."""
        return self.parts.of(int(np.bitwise_or.reduce(self.features[slots])) if len(slots) else 0)

    @property
    def block_table(self) -> np.ndarray:
        """[num_slots + 1, max_blocks] int32: of the layers that see everything."""
        return self.block_tables[0]

    def reserve(self, null_block: int) -> None:
        """Rows that stand for no sequence store their K/V in this block, which no sequence holds."""
        for table in self.block_tables:
            table[self.null_slot] = null_block

    def append_blocks(self, slot: int, block_ids: list[int], window_block_ids: list[list[int]]) -> None:
        start = int(self.num_blocks[slot])
        self.block_table[slot, start : start + len(block_ids)] = block_ids
        for i, ids in enumerate(window_block_ids, start):
            for table, block in zip(self.block_tables[1:], ids, strict=False):  # no ids: not read
                table[slot, i] = block
        self.num_blocks[slot] = start + len(block_ids)

    def kv_slots(self, slots: np.ndarray | int, positions: np.ndarray, group: int = 0) -> np.ndarray:
        """Where in the KV cache layers of ``group`` keep the tokens at ``positions`` of ``slots``: [n] int64 each."""
        size = self.block_size
        return self.block_tables[group][slots, positions // size].astype(np.int64) * size + positions % size

    def sampling_state(self, slots: np.ndarray) -> SamplingState:
        """What the sequences in ``slots`` [n] asked for."""
        is_greedy = self.is_greedy[slots]
        return SamplingState(
            is_greedy, self.seeds[slots], bool(is_greedy.all()), bool((self.logprobs[slots] >= 0).any())
        )

    def begin(self, batch: Batch) -> None:
        """Take in a plan: new sequences, new and other blocks, drafts."""
        for new in batch.new:
            self.add(new)
        changed = [s for s in batch.sequences if s.new_block_ids or s.draft_token_ids or s.replaced_blocks]
        for scheduled in changed:
            for place, block_id in scheduled.replaced_blocks:
                self.block_table[scheduled.slot, place] = block_id
            if scheduled.new_block_ids:
                self.append_blocks(scheduled.slot, scheduled.new_block_ids, scheduled.new_window_block_ids)
            drafts = scheduled.draft_token_ids
            if drafts:
                end = int(self.num_tokens[scheduled.slot])
                self.token_ids[scheduled.slot, end : end + len(drafts)] = drafts

    def is_undone(self, scheduled: ScheduledSequence, token_ids: list[int]) -> bool:
        """Whether a step that gained a sequence these tokens is taken back, states and all."""
        return self.has_states and 0 < len(token_ids) <= len(scheduled.draft_token_ids)

    def finish(self, scheduled: ScheduledSequence, token_ids: list[int]) -> None:
        """Take in what a step made of a sequence: its K/V, less rejected drafts, and its new tokens."""
        slot, num_drafts = scheduled.slot, len(scheduled.draft_token_ids)
        rejected = num_drafts + 1 - len(token_ids) if num_drafts else 0
        if not self.is_undone(scheduled, token_ids):
            self.num_computed[slot] += scheduled.num_new_tokens - rejected
        end = int(self.num_tokens[slot])
        if token_ids:
            self.token_ids[slot, end : end + len(token_ids)] = token_ids
            self.num_tokens[slot] = end + len(token_ids)

    def launch(self, slots: np.ndarray, num_new: np.ndarray, coming: np.ndarray) -> None:
        """Count a step whose tokens only the device knows, as ``finish`` does: [num_seqs] each.

        coming: tokens to come, drafts as if all were accepted.
        """
        self.num_computed[slots] += num_new
        self.token_ids[slots, self.num_tokens[slots]] = 0  # past the end of those that do not sample: nobody's
        self.num_tokens[slots] += coming
        self.unknown[slots] += coming

    def settle(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """Take in tokens that only the device knew, the oldest of each slot: [num_rows] each."""
        self.token_ids[slots, self.num_tokens[slots] - self.unknown[slots]] = token_ids
        self.unknown[slots] -= 1
