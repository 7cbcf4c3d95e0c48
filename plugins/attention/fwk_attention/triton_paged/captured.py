"""Plans of decode steps that are captured: as many tiles whatever the sequences' lengths, in buffers that stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fwk_attention.triton_paged.plan import Launch, LayerKind, decode_tiles, share_parts
from fwk_attention.triton_paged.shared import unused

if TYPE_CHECKING:
    from fwk.types import ForwardBatch
    from fwk_attention._common.staging import PlanBuffers

MAX_SPARE = 2048
"""Tiles of a step beyond one for each sequence; each is a program for each KV head, which ends at once if unused."""

NO_TILE = (0, 0, 0, 0, 0, 0, 0, -1)
"""Of no token, and of no key: nothing is stored."""


class CapturedDecodes:
    """The tiles of ``plan_launches``, and after them some of no token, up to a number that the batch size tells.

    A sequence is cut as it is in any other step, so its numbers are the same. Shared tiles are half as many; what more
    would take is not shared.
    """

    def __init__(
        self, buffers: PlanBuffers, kinds: list[LayerKind], num_seqs: int, max_seq_len: int, num_tokens: int
    ) -> None:
        """num_tokens: that the rows of a step have before them together, where sequences share none."""
        self._buffers = buffers
        self._kinds = kinds
        self._per_seq = -(-max_seq_len // kinds[0].split)
        self._spare = min(num_tokens // kinds[0].split, MAX_SPARE)
        for i in range(len(kinds)):
            buffers.fixed(f"captured tiles {i}", (self.capacity(num_seqs), len(NO_TILE)), torch.int32)
            buffers.fixed(f"captured joins {i}", (num_seqs, 5), torch.int32)
            if kinds[i].shared_block_size:
                shape = (max(self.capacity(num_seqs) // 2, 1), len(unused(kinds[i].slots)))
                buffers.fixed(f"captured shared {i}", shape, torch.int32)

    def capacity(self, num_seqs: int) -> int:
        """Tiles of a step of so many sequences."""
        return min(num_seqs * self._per_seq, num_seqs + self._spare)

    def plan(self, batch: ForwardBatch) -> dict[LayerKind, list[Launch]] | None:
        """None where sequences that share their past have more of it together than there is room for."""
        count = batch.num_seqs
        capacity = self.capacity(count)
        cuts = [decode_tiles(batch, kind) for kind in self._kinds]
        if any(len(tiles) > capacity for tiles, _ in cuts):
            return None
        self._buffers.turn()
        plan: dict[LayerKind, list[Launch]] = {}
        for i, (kind, (tiles, joins)) in enumerate(zip(self._kinds, cuts, strict=True)):
            shared, most = None, capacity // 2
            if kind.shared_block_size and most:
                tiles, found = share_parts(tiles, batch, kind, most)
                shared = self._buffers.write(f"captured shared {i}", _filled(found, most, unused(kind.slots)))
            plan[kind] = [
                Launch(
                    kind.sizes.short_rows,
                    self._buffers.write(f"captured tiles {i}", _filled(tiles, capacity, NO_TILE)),
                    capacity,
                    self._buffers.write(f"captured joins {i}", _filled(joins, count, (0,) * 5)),
                    shared,
                )
            ]
        self._buffers.sent()
        return plan


def _filled(rows: Any, count: int, rest: Any) -> Any:
    """[n, m] int64 to [count, m] int32, whose last rows are ``rest``."""
    filled = np.empty((count, len(rest)), np.int32)
    filled[: len(rows)] = rows
    filled[len(rows) :] = rest
    return filled
