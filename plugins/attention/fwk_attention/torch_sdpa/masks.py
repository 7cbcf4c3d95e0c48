"""Which query sees which key, as a tensor to be added to scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fwk.interfaces.attention import KVKind
from fwk_attention.torch_sdpa.attend import fused_mask, prefers_fused

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.attention import AttentionLayer
    from fwk.interfaces.device import Upload
    from fwk.types import ForwardBatch


BIASES = ("alibi_slopes", "distance_bias")
"""What is added to scores by the distance of query and key."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers alike in this share one plan."""

    kv_group: int
    num_heads: int
    num_kv_heads: int
    sliding_window: int | None
    parts: int  # rows per token and head: K and V, or one latent
    is_explicit: bool  # scores are changed before the softmax, or the softmax itself is
    is_biased: bool  # by the distance of query and key
    chunk_size: int | None
    is_cross: bool = False  # every query sees all keys, none of which is its own

    @staticmethod
    def of(layer: AttentionLayer) -> LayerKind:
        parts = 1 if layer.kind is KVKind.LATENT else 2
        chunk = layer.extras.get("chunk_size")
        return LayerKind(
            layer.kv_group,
            layer.num_heads,
            layer.num_kv_heads,
            layer.sliding_window,
            parts,
            layer.soft_cap is not None or not layer.extras.keys().isdisjoint({"sinks", *BIASES}),
            not layer.extras.keys().isdisjoint(BIASES),
            None if chunk is None else int(chunk),
            "cross_attention" in layer.needs,
        )

    def first_seen(self, positions: Any) -> Any:
        """The first place that tokens at ``positions``, numpy, see of what came before them."""
        first = np.zeros_like(positions)
        if self.sliding_window is not None:
            first = np.maximum(positions - self.sliding_window + 1, first)
        if self.chunk_size is not None:
            first = np.maximum(positions // self.chunk_size * self.chunk_size, first)
        return first

    def hides(self, query: Tensor, key: Tensor) -> Tensor | None:
        """Which keys are out of reach of which queries, given their positions; None where none ever is."""
        hidden = None
        if self.sliding_window is not None:
            hidden = key <= query - self.sliding_window
        if self.chunk_size is not None:
            is_other = key // self.chunk_size != query // self.chunk_size
            hidden = is_other if hidden is None else hidden | is_other
        return hidden


@dataclass(frozen=True, slots=True)
class Queries:
    """Some new tokens of n sequences, all numpy int64. A token's *place* is its index in its sequence."""

    starts: Any  # [n]: first new token of the sequence in the batch
    pasts: Any  # [n]: tokens of the sequence before it
    num_new: Any  # [n]
    offsets: Any  # [n, num_queries]: which of the sequence's new tokens
    is_cross: bool = False  # none of ``pasts``, which all of them see

    @property
    def places(self) -> Any:
        """Of the last key that each sees."""
        return self.pasts[:, None] + (np.full_like(self.offsets, -1) if self.is_cross else self.offsets)

    @property
    def tokens(self) -> Any:
        """Their places in the batch."""
        return self.starts[:, None] + self.offsets


@dataclass(frozen=True, slots=True)
class Masks:
    """Makes the masks of one step for one kind of layer."""

    batch: ForwardBatch
    kind: LayerKind
    dtype: torch.dtype
    device: torch.device
    send: Upload

    def make(self, queries: Queries, key_places: Any) -> dict[str, Any]:
        """The way to compute these queries and keys [n, num_keys], with its mask."""
        if self.batch.tree_mask is None:
            query, key = self._tensor(queries.places).unsqueeze(-1), self._tensor(key_places).unsqueeze(1)
            hidden = key > query
        else:
            query, key, hidden = self._in_tree(queries, key_places, self.batch.tree_mask)
        beyond = self.kind.hides(query, key)
        if beyond is not None:
            hidden |= beyond
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        mask.masked_fill_(hidden, float("-inf"))
        is_fused = not self.kind.is_explicit and prefers_fused(self.device, queries.offsets.size * key_places.shape[1])
        group = self.kind.num_heads // self.kind.num_kv_heads
        return {
            "is_fused": is_fused,
            "mask": fused_mask(mask, group) if is_fused else mask,
            "distance": (key - query).float() if self.kind.is_biased else None,
        }

    def _in_tree(self, queries: Queries, key_places: Any, tree_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Positions of queries [n, num_queries, 1] and keys [n, 1, num_keys], and which of them the tree hides.

        New tokens see each other as the tree says, and positions are depths.
        """
        new = key_places - queries.pasts[:, None]  # which new token a key is; < 0: none
        column = np.clip(new, 0, queries.num_new[:, None] - 1)
        tokens = self._tensor(queries.tokens)
        seen = tree_mask[tokens].gather(2, self._tensor(column).unsqueeze(1).expand(-1, tokens.shape[1], -1))
        is_old = self._tensor(new < 0).unsqueeze(1)
        is_none = self._tensor(new >= queries.num_new[:, None]).unsqueeze(1)
        positions = self.batch.positions
        key = torch.where(
            is_old[:, 0], self._tensor(key_places), positions[self._tensor(queries.starts[:, None] + column)]
        )
        return positions[tokens].unsqueeze(-1), key.unsqueeze(1), ~(is_old | seen) | is_none

    def _tensor(self, x: Any) -> Tensor:
        return self.send(x)
