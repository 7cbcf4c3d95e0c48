"""Plans of decode steps that are captured: FlashInfer's wrappers for CUDA graphs, one for each number of sequences.

Such a wrapper launches the same programs whatever the lengths are, and copies what it is planned with into buffers
that it was made with. Those are shared by the wrappers of all sizes, of which a step plans one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fwk_attention.flashinfer.plan import LayerKind, Mode, Part, Slots

if TYPE_CHECKING:
    from fwk.interfaces.attention import CaptureSizes
    from fwk.types import ForwardBatch
    from fwk.types.batch import KVGroup
    from fwk_attention._common.staging import PlanBuffers
    from fwk_attention.flashinfer.wrappers import PageBuffers, PlannedWrapper, Wrappers


class CapturedDecodes:
    """What stays where it is, and the wrappers over it."""

    def __init__(
        self, buffers: PlanBuffers, wrappers: Wrappers, groups: set[int], sizes: CaptureSizes, block_size: int
    ) -> None:
        """groups: KV groups of the layers."""
        self._buffers = buffers
        self._wrappers = wrappers
        self._null_block = sizes.null_block
        self._block_size = block_size
        per_seq = -(-sizes.max_seq_len // block_size)
        self.max_pages = min(sizes.num_seqs * per_seq, sizes.num_seqs + sizes.num_blocks * sizes.rows_per_seq)
        """Of a step; sequences that share their past may have more together, as it counts for each."""
        self._pages = {group: wrappers.page_buffers(sizes.num_seqs, self.max_pages) for group in groups}
        self._made: dict[tuple[LayerKind, int], PlannedWrapper] = {}
        for group in groups:
            for name in ("blocks", "offsets", "fresh"):
                buffers.fixed(f"captured {name} {group}", (sizes.num_seqs,), torch.int64)

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether the step's pages do."""
        return int((-(-batch.seq_lens_np.astype(np.int64) // self._block_size)).sum()) <= self.max_pages

    def part(self, batch: ForwardBatch, kind: LayerKind) -> Part:
        """The whole step."""
        whole = slice(0, batch.num_seqs)
        return Part(Mode.LATENT if kind.is_latent else Mode.DECODE, whole, whole)

    def wrapper(self, kind: LayerKind, mode: Mode, num_seqs: int) -> PlannedWrapper:
        """The one that steps of so many sequences are captured with."""
        key = kind, num_seqs
        if key not in self._made:
            pages: PageBuffers = self._pages[kind.kv_group]
            self._made[key] = self._wrappers.captured(kind, mode, pages.of(num_seqs))
        return self._made[key]

    def slots(self, number: int, group: KVGroup) -> Slots:
        """Where new tokens go; where no block is fresh, the null block is cleared again."""
        blocks, offsets = np.divmod(group.slot_mapping_np, self._block_size)
        fresh = np.where(offsets == 0, blocks, self._null_block)
        named = {"blocks": blocks, "offsets": offsets, "fresh": fresh}
        return Slots(*(self._buffers.write(f"captured {name} {number}", x) for name, x in named.items()))
