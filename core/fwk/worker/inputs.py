"""From the plan of a step to the tensors of its forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fwk.types import Batch, ForwardBatch
from fwk.types.batch import KVGroup
from fwk.worker.table import SequenceTable


@dataclass(slots=True)
class StepRows:
    """Which rows of the step's logits belong to whom. A sequence whose drafts are verified has several rows."""

    sequences: np.ndarray  # [num_rows] int64: place in the batch
    slots: np.ndarray  # [num_rows] int64
    num_tokens: np.ndarray  # [num_rows] int64: tokens before the position the logits are for


class InputBuffers:
    """Tensors allocated once and filled in place each step; on a device, from a pinned twin on the CPU."""

    def __init__(self, table: SequenceTable, max_tokens: int, num_slots: int, device: torch.device) -> None:
        self._table = table
        self._device = device
        self._pairs: dict[str, tuple[np.ndarray, torch.Tensor]] = {}
        rows = max(max_tokens, num_slots)
        for name, shape, dtype in (
            ("token_ids", (rows,), np.int64),
            ("positions", (rows,), np.int64),
            ("slot_mapping", (rows,), np.int64),
            ("query_start", (num_slots + 1,), np.int32),
            ("seq_lens", (num_slots,), np.int32),
            ("logits_at", (rows,), np.int64),
            ("block_table", (num_slots * table.block_table.shape[1],), np.int32),
        ):
            self._pairs[name] = self._pair(shape, dtype)

    def _pair(self, shape: tuple[int, ...], dtype: type) -> tuple[np.ndarray, torch.Tensor]:
        if self._device.type == "cpu":
            array = np.zeros(shape, dtype)
            return array, torch.from_numpy(array)
        host = torch.zeros(shape, dtype=torch.from_numpy(np.zeros(1, dtype)).dtype).pin_memory()
        return host.numpy(), torch.empty_like(host, device=self._device)

    def _fill(self, name: str, values: np.ndarray) -> tuple[np.ndarray, torch.Tensor]:
        array, tensor = self._pairs[name]
        n = len(values)
        np.copyto(array[:n], values, casting="same_kind")
        if self._device.type != "cpu":
            tensor[:n].copy_(torch.from_numpy(array[:n]), non_blocking=True)
        return array[:n], tensor[:n]

    def prepare(self, batch: Batch) -> tuple[ForwardBatch, StepRows]:
        """Fill the buffers for a batch whose sequences the table already knows."""
        table = self._table
        slots = np.array([s.slot for s in batch.sequences], np.int64)
        num_new = np.array([s.num_new_tokens for s in batch.sequences], np.int64)
        computed = table.num_computed[slots]
        seq_lens = computed + num_new
        starts = np.zeros(len(slots) + 1, np.int64)
        np.cumsum(num_new, out=starts[1:])
        is_decode = bool(starts[-1] == len(slots))
        if is_decode:
            rows, positions = slots, computed
        else:
            rows = np.repeat(slots, num_new)
            positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - computed, num_new)
        block_size = table.block_size
        slot_mapping = table.block_table[rows, positions // block_size].astype(np.int64) * block_size
        slot_mapping += positions % block_size
        width = -(-int(seq_lens.max()) // block_size)
        blocks_np, blocks = self._fill("block_table", table.block_table[slots, :width].ravel())
        step_rows = self._rows(batch, slots, starts, computed)
        slots_np, slots_tensor = self._fill("slot_mapping", slot_mapping)
        starts_np, starts_tensor = self._fill("query_start", starts)
        lens_np, lens_tensor = self._fill("seq_lens", seq_lens)
        logits_at = starts[step_rows.sequences] + (step_rows.num_tokens - 1 - computed[step_rows.sequences])
        group = KVGroup(slots_tensor, blocks.view(-1, width), slots_np, blocks_np.reshape(-1, width))
        forward = ForwardBatch(
            token_ids=self._fill("token_ids", table.token_ids[rows, positions])[1],
            positions=self._fill("positions", positions)[1],
            query_start=starts_tensor,
            seq_lens=lens_tensor,
            logits_at=self._fill("logits_at", logits_at)[1],
            kv_groups=[group],
            query_start_np=starts_np,
            seq_lens_np=lens_np,
            is_decode=is_decode,
        )
        return forward, step_rows

    def _rows(self, batch: Batch, slots: np.ndarray, starts: np.ndarray, computed: np.ndarray) -> StepRows:
        """The positions whose logits choose a token: the last new one, and with drafts every one from it back."""
        counts = np.array([1 + len(s.draft_token_ids) if s.samples else 0 for s in batch.sequences], np.int64)
        sequences = np.repeat(np.arange(len(slots)), counts)
        last = computed + np.diff(starts)  # tokens of each sequence after this step, drafts included
        if len(sequences) == int(np.count_nonzero(counts)):
            num_tokens = last[sequences]
        else:
            ends = np.cumsum(counts)
            num_tokens = last[sequences] - (np.repeat(ends, counts) - 1 - np.arange(len(sequences)))
        return StepRows(sequences, slots[sequences], num_tokens)
