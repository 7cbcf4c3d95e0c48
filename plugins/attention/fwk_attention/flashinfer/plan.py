"""A step in FlashInfer's terms: its "pages" are blocks, listed for all sequences one after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.attention import AttentionLayer
    from fwk.types import ForwardBatch


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers alike in this share one plan: FlashInfer wants all of it beforehand."""

    kv_group: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None

    @staticmethod
    def of(layer: AttentionLayer) -> LayerKind:
        return LayerKind(
            layer.kv_group,
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_size,
            layer.scale,
            layer.sliding_window,
            layer.soft_cap,
        )


@dataclass(frozen=True, slots=True)
class Pages:
    """Where the sequences' K/V are; int32, on the CPU as FlashInfer plans there, but for ``indices``."""

    indptr: Tensor  # [num_seqs + 1]: first page of each sequence among ``indices``
    indices: Tensor  # [indptr[-1]], on the device
    last_page_len: Tensor  # [num_seqs]: tokens in each sequence's last page, 1 to block_size


@dataclass(frozen=True, slots=True)
class Slots:
    """Where the new tokens' K/V go, on the device."""

    blocks: Tensor  # [num_tokens] int64
    offsets: Tensor  # [num_tokens] int64
    fresh: Tensor | None  # blocks whose first slot is among them


def pages_of(seq_lens: Any, table: Any, block_size: int, device: torch.device) -> Pages:
    """seq_lens: [num_seqs]; table: [num_seqs, max_blocks], numpy."""
    lens = seq_lens.astype(np.int64)
    counts = -(-lens // block_size)
    indptr = np.concatenate(([0], np.cumsum(counts)))
    indices = table[np.arange(table.shape[1]) < counts[:, None]]
    return Pages(
        torch.from_numpy(indptr.astype(np.int32)),
        torch.from_numpy(indices.astype(np.int32)).to(device, non_blocking=True),
        torch.from_numpy(((lens - 1) % block_size + 1).astype(np.int32)),
    )


def slots_of(slot_mapping: Any, block_size: int, device: torch.device) -> Slots:
    """slot_mapping: [num_tokens] int64, numpy."""
    blocks, offsets = np.divmod(slot_mapping, block_size)
    fresh = blocks[offsets == 0]

    def tensor(x: Any) -> Tensor:
        return torch.from_numpy(x).to(device, non_blocking=True)

    return Slots(tensor(blocks), tensor(offsets), tensor(fresh) if len(fresh) else None)


def tree_mask(batch: ForwardBatch, window: int | None) -> Tensor:
    """[sum over sequences of num_new * seq_len] bool, row by row: which new token sees which token.

    FlashInfer counts its window in places, so with a tree the window, which counts positions, is part of the mask.
    """
    tree = batch.tree_mask
    assert tree is not None, "no tree in this step"
    starts = batch.query_start_np.tolist()
    masks: list[Tensor] = []
    for start, stop, length in zip(starts, starts[1:], batch.seq_lens_np.tolist(), strict=False):
        past = length - (stop - start)
        old = torch.ones((stop - start, past), dtype=torch.bool, device=tree.device)
        mask = torch.cat((old, tree[start:stop, : stop - start]), 1)
        if window is not None:
            positions = batch.positions[start:stop]
            keys = torch.cat((torch.arange(past, device=tree.device), positions))
            mask &= keys > positions[:, None] - window
        masks.append(mask.flatten())
    return torch.cat(masks)
