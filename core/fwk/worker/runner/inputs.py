"""From the plan of a step to the tensors of its forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fwk.interfaces.device import Upload
from fwk.interfaces.drafting import Positions
from fwk.interfaces.step import StepRows
from fwk.types import Batch, ForwardBatch
from fwk.types.batch import KVGroup, StateRows
from fwk.worker.graphs.graph_sizes import GraphSizes
from fwk.worker.runner.sequence_table import SequenceTable
from fwk.worker.runner.staging import StagingRing
from fwk.worker.runner.step_rows import DecodeStep, StepMembers

MIN_SLOTS = 16
"""Sequences and tokens that there is room for, however few are served: steps of so many can be captured."""


class InputBuffers:
    """Tensors allocated once and filled in place each step; on a device, by copies from a ring of host buffers.

    While the same sequences decode on a CPU, a step's inputs are those of the step before, each a place further: the
    same objects come again with other numbers in them, which costs a tenth of building them anew.
    """

    def __init__(
        self,
        table: SequenceTable,
        max_tokens: int,
        num_slots: int,
        ring: StagingRing,
        *,
        prunes_last_layer: bool = False,
        has_states: bool = False,
        has_encoder: bool = False,
    ) -> None:
        """ring: without buffers yet.

        prunes_last_layer: the model's word; then batches say which tokens' hidden states are wanted.
        """
        self.table = table
        self._ring = ring
        self._prunes_last_layer = prunes_last_layer
        self._has_states = has_states
        self._has_encoder = has_encoder
        self.send: Upload = torch.from_numpy
        """Brings what is in no buffer to the device."""
        self.newest: torch.Tensor | None = None
        """[num_slots] int64 on the device: the newest token of sequences, of which the host may know less."""
        self.graph_sizes: GraphSizes | None = None
        """Steps of these sizes are captured: such a step's inputs are where they are read, padded if need be."""
        self.piece_sizes: GraphSizes | None = None
        """Other steps of so many tokens are replayed in pieces: rows of zeros follow their tokens."""
        self._wide_tables: list[torch.Tensor] = []
        self._last: DecodeStep | None = None  # whose inputs are in the buffers
        self._members: StepMembers | None = None  # of the step before
        num_slots = max(num_slots, MIN_SLOTS)
        rows = max(max_tokens, num_slots)
        for name, shape, dtype in (
            ("token_ids", (rows,), torch.int64),
            ("positions", (rows,), torch.int64),
            ("query_start", (num_slots + 1,), torch.int32),
            ("seq_lens", (num_slots,), torch.int32),
            ("logits_indices", (rows,), torch.int64),
            ("hidden_indices", (rows,), torch.int64),
            ("state_rows", (num_slots,), torch.int64),
            ("row_slots", (rows,), torch.int64),
            ("newest", (2 * rows,), torch.int64),
        ):
            ring.add(name, shape, dtype)
        for group in range(len(table.block_tables)):
            ring.add(f"slot_mapping.{group}", (rows,), torch.int64)
            ring.add(f"block_table.{group}", (num_slots * table.block_table.shape[1],), torch.int32)
        self.max_tokens = min(rows, num_slots * self._longest)

    @property
    def _longest(self) -> int:
        """Tokens that a sequence may have."""
        return self.table.token_ids.shape[1] - 1

    def prepare(self, batch: Batch, trees: Positions | None = None) -> tuple[ForwardBatch, StepRows]:
        """Fill the buffers for a batch whose sequences the table already knows.

        trees: where drafts stand that are trees, if some are. The objects may be those of the step before.
        """
        if self._last is not None and trees is None and self._last.is_before(batch):
            return self._advance(self._last, batch)
        table = self.table
        members = self._members_of(batch)
        slots = members.slots
        computed = table.num_computed[slots]
        counts = [s.num_new_tokens for s in batch.sequences]
        is_decode = sum(counts) == len(counts)
        if is_decode:
            num_new, starts, rows, positions = members.ones, members.starts, slots, computed
        else:
            num_new = np.array(counts, np.int64)
            starts = np.zeros(len(slots) + 1, np.int64)
            np.cumsum(num_new, out=starts[1:])
            rows = np.repeat(slots, num_new)
            positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - computed, num_new)
        seq_lens = computed + num_new
        step_rows = self._rows(batch, members, starts, computed)
        logits_indices = starts[step_rows.sequences] + (step_rows.num_tokens - 1 - computed[step_rows.sequences])
        token_ids = table.token_ids[rows, positions]
        # No capture has room for such a step.
        is_eager = members.is_eager(batch)
        padding = None if trees is not None or is_eager else self._padding(step_rows, len(token_ids))
        if padding is not None:
            forward = self._padded(rows, token_ids, positions, padding)
        else:
            slot_mappings = self._slot_mappings(rows, positions)
            if trees is not None:  # a draft's K/V has a place of its own, whatever its depth: no two share one
                positions = trees(positions, slots, starts, seq_lens)
            more = None if is_eager or self.piece_sizes is None else self.piece_sizes.padding(len(token_ids))
            hidden_indices, logits_indices = self._wanted(
                logits_indices,
                len(token_ids),
                more is not None or step_rows.wants_hidden,
            )
            wanted = hidden_indices, logits_indices
            forward = self._filled(
                slots, token_ids, positions, slot_mappings, starts, seq_lens, *wanted, padding=more or 0
            )
            if more is not None:  # the last layer's pieces are of as many rows as those before
                forward.piece_tokens, forward.hidden_indices = len(token_ids) + more, None
            if is_eager and step_rows.wants_hidden:
                forward.hidden_indices = None  # no token need be looked for
        forward.is_eager = is_eager
        if self._ring.is_host:
            self._send(forward)
        else:
            step_rows.slots_on_device = self._ring.fill("row_slots", step_rows.slots)[1]
            self._send_with_newest(forward, step_rows, rows, positions)
        if trees is None and self._ring.is_host and is_decode and len(step_rows.slots) == len(slots) and not is_eager:
            num_left = forward.kv_groups[0].block_table_np.shape[1] * table.block_size - int(seq_lens.max())
            self._last = DecodeStep(slots.tolist(), forward, step_rows, num_left)
        return forward, step_rows

    def _members_of(self, batch: Batch) -> StepMembers:
        """Those of the step before, where they are the same; what is known of a slot changes with its sequence."""
        listed = [s.slot for s in batch.sequences]
        members = self._members
        if members is None or batch.new or members.listed != listed:
            members = self._members = StepMembers.of(listed, self.table)
        return members

    def _send_with_newest(
        self, forward: ForwardBatch, rows: StepRows, slots: np.ndarray, positions: np.ndarray
    ) -> None:
        """Send the inputs, and put in the tokens that only the device knows.

        slots, positions: [num_tokens] int64 each, without padding.
        """
        unknown = self.table.unknown[slots]
        if self.newest is None or not unknown.any():
            return self._send(forward)
        is_decode = not rows.has_drafts and len(slots) == len(rows.slots) == forward.num_seqs - forward.padding
        if is_decode and unknown.all():  # a token of each
            self._send(forward)
            assert rows.slots_on_device is not None
            torch.index_select(self.newest, 0, rows.slots_on_device, out=forward.token_ids[: len(slots)])
            return None
        ends = self.table.num_tokens[slots]  # drafts come after
        places = np.flatnonzero((positions >= ends - unknown) & (positions < ends))
        index = self._ring.fill("newest", np.concatenate((places, slots[places])))[1]
        self._send(forward)
        forward.token_ids.index_copy_(0, index[: len(places)], self.newest.index_select(0, index[len(places) :]))
        return None

    def _send(self, forward: ForwardBatch) -> None:
        """What was filled is on its way to the device; captured steps find their block tables where they were."""
        self._ring.sent()
        if forward.is_static:
            for group, wide in zip(forward.kv_groups, self._wide_tables, strict=True):
                table = wide[: forward.num_seqs]
                table[:, : group.block_table.shape[1]].copy_(group.block_table)
                group.block_table = table

    def _padding(self, rows: StepRows, num_tokens: int) -> int | None:
        """Rows to add to a step of next tokens and chains of drafts to make it one that is captured.

        None: it is none, for it has tokens whose logits nobody wants, or it asks for more.
        """
        if self.graph_sizes is None or len(rows.slots) != num_tokens:
            return None
        if rows.wants_hidden:
            return None
        return self.graph_sizes.padding(num_tokens)

    def _padded(self, slots: np.ndarray, token_ids: np.ndarray, positions: np.ndarray, padding: int) -> ForwardBatch:
        """Fill the buffers for a step of a captured size: [num_tokens] each, without the padding.

        Each token is a row of its own, a sequence of one new token as attention sees it: drafts in a chain read, as any
        next token does, what the rows before them store. ``_send`` comes later.
        """
        if padding:
            slots = np.concatenate((slots, np.full(padding, self.table.null_slot)))
            token_ids, positions = (np.pad(x, (0, padding)) for x in (token_ids, positions))
        each = np.arange(len(slots))
        places, starts = self._slot_mappings(slots, positions), np.arange(len(slots) + 1)
        forward = self._filled(slots, token_ids, positions, places, starts, positions + 1, each, each)
        forward.padding, forward.is_static = padding, True
        return forward

    def capture_decodes(self, num_rows: int) -> Callable[[int], ForwardBatch]:
        """Make room for captured steps of up to so many rows; returns what makes blank ones.

        Their block tables have room for the longest sequence: a captured kernel knows how far its rows are apart.
        """
        shape = (num_rows, self.table.block_table.shape[1])
        self._wide_tables = [
            torch.zeros(shape, dtype=torch.int32, device=self._ring.where) for _ in self.table.block_tables
        ]
        no_rows = np.zeros(0, np.int64)

        def blank(count: int) -> ForwardBatch:
            forward = self._padded(no_rows, no_rows, no_rows, count)
            self._send(forward)
            return forward

        return blank

    def _advance(self, last: DecodeStep, batch: Batch) -> tuple[ForwardBatch, StepRows]:
        """Change the buffers, which are the device's own, for the step after ``last``."""
        table = self.table
        groups = last.forward.kv_groups
        moved = [i for i, s in enumerate(batch.sequences) if s.new_block_ids or s.replaced_blocks]
        for group, blocks in zip(groups, table.block_tables, strict=True):
            for i in moved:
                group.block_table_np[i] = blocks[last.slots[i], : group.block_table_np.shape[1]]
        names = ("positions", "seq_lens", "slot_mapping.0", "token_ids")
        first = groups[0].block_table_np
        arrays = (*(self._ring.last(name) for name in names), last.rows.num_tokens, first, table.token_ids)
        # After a step nothing of this is left in a core's cache, neither code nor data: a few numbers are sooner
        # changed by the interpreter, which is at work anyway, than by ten different functions of numpy.
        positions, seq_lens, places, token_ids, num_tokens, blocks, known = (x.data for x in arrays)
        size = table.block_size
        for i, slot in enumerate(last.slots):
            position = positions[i] + 1
            positions[i] = position
            seq_lens[i] = num_tokens[i] = position + 1
            places[i] = blocks[i, position // size] * size + position % size
            token_ids[i] = known[slot, position]
        last.num_left -= 1
        for group in groups[1:]:
            places, blocks = group.slot_mapping_np.data, group.block_table_np.data
            for i in range(len(last.slots)):
                position = positions[i]
                places[i] = blocks[i, position // size] * size + position % size
        return last.forward, last.rows

    def fill(
        self,
        slots: np.ndarray,
        token_ids: np.ndarray | torch.Tensor,
        positions: np.ndarray,
        starts: np.ndarray,
        seq_lens: np.ndarray,
        wanted: np.ndarray,
        places: np.ndarray | None = None,
    ) -> ForwardBatch:
        """``StepInputs.fill``."""
        rows = np.repeat(slots, np.diff(starts))
        where = self._slot_mappings(rows, positions if places is None else places)
        return self._forward(slots, token_ids, positions, where, starts, seq_lens, wanted, np.arange(len(wanted)))

    def blank(self, num_tokens: int, num_hidden: int, num_logits: int, num_seqs: int) -> ForwardBatch:
        """A batch whose numbers mean nothing; of more sequences where the tokens are too many for so few."""
        num_seqs = max(num_seqs, -(-num_tokens // self._longest))
        starts = np.arange(num_seqs + 1) * num_tokens // num_seqs
        nothing = np.zeros(num_tokens, np.int64)
        slots, hidden_indices, logits_indices = (np.zeros(n, np.int64) for n in (num_seqs, num_hidden, num_logits))
        places = [nothing] * len(self.table.block_tables)
        return self._forward(slots, nothing, nothing, places, starts, np.diff(starts), hidden_indices, logits_indices)

    def _slot_mappings(self, slots: np.ndarray, positions: np.ndarray) -> list[np.ndarray]:
        return [self.table.kv_slots(slots, positions, group) for group in range(len(self.table.block_tables))]

    def _wanted(self, logits_indices: np.ndarray, num_tokens: int, wants_all: bool) -> tuple[np.ndarray, np.ndarray]:
        """The tokens whose hidden states are wanted, and which of these are turned into logits.

        logits_indices: the tokens whose logits are wanted. Of at least one token hidden states are: no kernel need know
        what to do with none.
        """
        if wants_all or not self._prunes_last_layer:
            return np.arange(num_tokens), logits_indices
        if not len(logits_indices):
            return np.zeros(1, np.int64), logits_indices
        return logits_indices, np.arange(len(logits_indices))

    def _forward(self, slots: np.ndarray, token_ids: np.ndarray | torch.Tensor, *arrays: Any) -> ForwardBatch:
        """As ``_filled``, and sent."""
        forward = self._filled(slots, token_ids, *arrays)
        self._ring.sent()
        return forward

    def _filled(  # noqa: PLR0913 - the inputs of a step
        self,
        slots: np.ndarray,
        token_ids: np.ndarray | torch.Tensor,
        positions: np.ndarray,
        slot_mappings: list[np.ndarray],
        starts: np.ndarray,
        seq_lens: np.ndarray,
        hidden_indices: np.ndarray,
        logits_indices: np.ndarray,
        *,
        padding: int = 0,
    ) -> ForwardBatch:
        """Fill the buffers, which are not on the device before ``_send``. padding: zeros after tokens and positions."""
        self._last = None
        ring = self._ring
        ring.turn()
        # What captured steps read comes first: with as many tokens it must be at the same addresses each time. What
        # there is one of for each token comes before what there is one of for each sequence.
        if padding:
            assert isinstance(token_ids, np.ndarray)
            count = len(token_ids)
            tokens = self._fill_tokens(np.pad(token_ids, (0, padding)))[:count]
            where = ring.fill("positions", np.pad(positions, (0, padding)))[1][:count]
        else:
            tokens = self._fill_tokens(token_ids)
            where = ring.fill("positions", positions)[1]
        stored = [ring.fill(f"slot_mapping.{i}", slot_mapping) for i, slot_mapping in enumerate(slot_mappings)]
        wanted = ring.fill("logits_indices", logits_indices)[1]
        hidden = ring.fill("hidden_indices", hidden_indices)[1] if self._prunes_last_layer else None
        starts_np, starts_tensor = ring.fill("query_start", starts)
        lens_np, lens_tensor = ring.fill("seq_lens", seq_lens)
        states = self._state_rows(slots) if self._has_states else None
        width = -(-int(seq_lens.max()) // self.table.block_size)
        groups: list[KVGroup] = []
        for i, (table, (slots_np, slots_tensor)) in enumerate(zip(self.table.block_tables, stored, strict=True)):
            blocks_np, blocks = ring.fill(f"block_table.{i}", table[slots, :width].ravel())
            groups.append(KVGroup(slots_tensor, blocks.view(-1, width), slots_np, blocks_np.reshape(-1, width)))
        return ForwardBatch(
            token_ids=tokens,
            positions=where,
            query_start=starts_tensor,
            seq_lens=lens_tensor,
            logits_indices=wanted,
            kv_groups=groups,
            query_start_np=starts_np,
            seq_lens_np=lens_np,
            is_decode=len(token_ids) == len(slots),
            hidden_indices=hidden,
            state_rows=states,
            encoder_lens_np=self.table.num_encoder[slots] if self._has_encoder else None,
        )

    def _fill_tokens(self, token_ids: np.ndarray | torch.Tensor) -> torch.Tensor:
        if isinstance(token_ids, np.ndarray):
            return self._ring.fill("token_ids", token_ids)[1]
        if self._ring.is_host:
            return self._ring.fill("token_ids", np.maximum(token_ids.numpy(), 0))[1]
        return self._ring.put("token_ids", token_ids.clamp(min=0))

    def _state_rows(self, slots: np.ndarray) -> StateRows:
        """A sequence's states are in the row of its slot."""
        rows_np, rows = self._ring.fill("state_rows", slots)
        return StateRows(rows, rows_np)

    def _rows(self, batch: Batch, members: StepMembers, starts: np.ndarray, computed: np.ndarray) -> StepRows:
        """The positions whose logits choose a token: the last new one, and with drafts every one from it back."""
        if starts is members.starts and all([s.samples for s in batch.sequences]):
            return members.rows(computed)
        slots = members.slots
        counts = np.array([1 + len(s.draft_token_ids) if s.samples else 0 for s in batch.sequences], np.int64)
        sequences = np.repeat(np.arange(len(slots)), counts)
        last = computed + np.diff(starts)  # tokens of each sequence after this step, drafts included
        has_drafts = len(sequences) != int(np.count_nonzero(counts))
        if not has_drafts:
            num_tokens = last[sequences]
        else:
            ends = np.cumsum(counts)
            num_tokens = last[sequences] - (np.repeat(ends, counts) - 1 - np.arange(len(sequences)))
        plan = slots, np.diff(starts), counts > 0
        return StepRows(
            sequences,
            slots[sequences],
            num_tokens,
            wants_hidden=members.reads_hidden,
            parts=members.parts,
            has_drafts=has_drafts,
            plan=plan,
        )
