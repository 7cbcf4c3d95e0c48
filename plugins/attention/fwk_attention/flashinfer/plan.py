"""A step in FlashInfer's terms: its "pages" are blocks, listed for all sequences one after another."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fwk.interfaces.attention import KVKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fwk.interfaces.attention import AttentionLayer
    from fwk.types import ForwardBatch

    Send = Callable[[Any], Tensor]
    """A numpy array to the device."""


class Mode(Enum):
    """The wrappers of FlashInfer: a plan for one says nothing to another."""

    DECODE = "decode"
    CAUSAL = "causal"
    TREE = "tree"
    LATENT = "latent"


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers alike in this share one plan: FlashInfer wants all of it beforehand."""

    kv_group: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_head_size: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    is_latent: bool

    @staticmethod
    def of(layer: AttentionLayer) -> LayerKind:
        return LayerKind(
            layer.kv_group,
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_size,
            layer.value_head_size,
            layer.scale,
            layer.sliding_window,
            layer.soft_cap,
            layer.kind is KVKind.LATENT,
        )


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive sequences of a step that one wrapper computes, and their tokens."""

    mode: Mode
    sequences: slice
    tokens: slice


@dataclass(frozen=True, slots=True)
class Pages:
    """Where the sequences' K/V are; int32, on the CPU as FlashInfer plans there, but for ``indices``."""

    indptr: Tensor  # [num_seqs + 1]: first page of each sequence among ``indices``
    indices: Tensor  # [indptr[-1]], on the device
    last_page_len: Tensor  # [num_seqs]: tokens in each sequence's last page, 1 to block_size
    seq_lens: Tensor  # [num_seqs]


@dataclass(frozen=True, slots=True)
class Slots:
    """Where the new tokens' K/V go, on the device."""

    blocks: Tensor  # [num_tokens] int64
    offsets: Tensor  # [num_tokens] int64
    fresh: Tensor | None  # blocks whose first slot is among them


def parts_of(batch: ForwardBatch, is_latent: bool) -> list[Part]:
    """The step cut in two: the sequences in front that have one new token, which are decoded, and the rest.

    Kernels for prompts would compute whole tiles of queries for each sequence that decodes. Where a sequence with more
    new tokens stands before one that decodes, the latter is computed with the prompts.
    """
    starts = batch.query_start_np
    last = len(starts) - 1
    if is_latent:
        return [Part(Mode.LATENT, slice(0, last), slice(0, int(starts[-1])))]
    is_longer = np.diff(starts) != 1
    first = int(is_longer.argmax()) if is_longer.any() else last
    rest = Mode.CAUSAL if batch.tree_mask is None else Mode.TREE
    cuts = ((Mode.DECODE, 0, first), (rest, first, last))
    return [Part(mode, slice(a, b), slice(int(starts[a]), int(starts[b]))) for mode, a, b in cuts if a < b]


def pages_of(seq_lens: Any, table: Any, block_size: int, device: torch.device, send: Send) -> Pages:
    """seq_lens: [num_seqs]; table: [num_seqs, max_blocks], numpy. send: of ``indices`` to the device."""
    lens = seq_lens.astype(np.int64)
    counts = -(-lens // block_size)
    indptr = np.concatenate(([0], np.cumsum(counts)))
    indices = table[np.arange(table.shape[1]) < counts[:, None]]
    return Pages(
        pinned(indptr.astype(np.int32), device),
        send(indices.astype(np.int32)),
        pinned(((lens - 1) % block_size + 1).astype(np.int32), device),
        pinned(lens.astype(np.int32), device),
    )


def slots_of(slot_mapping: Any, block_size: int, send: Callable[[str, Any], Tensor]) -> Slots:
    """slot_mapping: [num_tokens] int64, numpy."""
    blocks, offsets = np.divmod(slot_mapping, block_size)
    fresh = blocks[offsets == 0]
    return Slots(send("blocks", blocks), send("offsets", offsets), send("fresh", fresh) if len(fresh) else None)


def pinned(x: Any, device: torch.device) -> Tensor:
    """A numpy array as a tensor on the CPU from which the device copies without making the host wait.

    torch's allocator of pinned memory gives it to nobody else before such copies have ended.
    """
    tensor = torch.from_numpy(x)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def tree_mask(batch: ForwardBatch, part: Part, window: int | None) -> Tensor:
    """[sum over the part's sequences of num_new * seq_len] bool, row by row: which new token sees which token.

    FlashInfer counts its window in places, so with a tree the window, which counts positions, is part of the mask.
    """
    tree = batch.tree_mask
    assert tree is not None, "no tree in this step"
    first, last = part.sequences.start, part.sequences.stop
    starts = batch.query_start_np[first : last + 1].tolist()
    masks: list[Tensor] = []
    for start, stop, length in zip(starts, starts[1:], batch.seq_lens_np[first:last].tolist(), strict=False):
        past = length - (stop - start)
        old = torch.ones((stop - start, past), dtype=torch.bool, device=tree.device)
        mask = torch.cat((old, tree[start:stop, : stop - start]), 1)
        if window is not None:
            positions = batch.positions[start:stop]
            keys = torch.cat((torch.arange(past, device=tree.device), positions))
            mask &= keys > positions[:, None] - window
        masks.append(mask.flatten())
    return torch.cat(masks)
