"""How a block's numbers lie (the same as in attention.h), and moving single tokens within."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fwk.interfaces.attention import AttentionLayer, BlockFormat, KVSpec

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 16
"""Keys, or numbers of a head, that the kernel works on at a time."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of all layers' blocks but for what differs between layers.

    A block is [num_kv_heads, 2 (K, V), numbers] in tiles as the kernel's products want them, where block and head sizes
    allow and no other backend shares the cache; otherwise [2, num_kv_heads, block_size, numbers] in rows. Quantised
    numbers are bytes, followed by a float32 for each token to multiply them with.
    """

    block_size: int
    per_word: int
    """Numbers in a lane of a product: 2 where the machine multiplies pairs of bfloat16."""
    dtype: torch.dtype
    is_shared: bool = False
    """Whether rows are wanted, whatever the sizes."""

    @property
    def is_quantised(self) -> bool:
        return self.dtype == torch.uint8

    def is_tiled(self, head_size: int) -> bool:
        return not self.is_shared and self.block_size % GROUP == 0 and head_size % GROUP == 0

    def block_format(self, spec: KVSpec) -> BlockFormat:
        """Tiles, and tiles of other words, have other shapes: whoever compares shapes tells them apart."""
        numbers, scales = self.block_size * spec.head_size, 4 * self.block_size if self.is_quantised else 0
        is_tiled = self.is_tiled(spec.head_size)
        if is_tiled:
            shape = (spec.num_kv_heads, 2, (numbers + scales) // self.per_word, self.per_word)
        else:
            shape = (2, spec.num_kv_heads, self.block_size, (numbers + scales) // self.block_size)
        return BlockFormat(shape, self.dtype, head_dim=0 if is_tiled else 1)

    def move(self, layer: AttentionLayer, source: Tensor, target: Tensor) -> None:
        """Copy the K and V of slots ``source`` [n] to slots ``target`` [n], as if all at once."""
        cache = layer.kv_cache
        assert cache is not None, "move before the KV cache was allocated"
        size, words, head = self.block_size, self.per_word, layer.head_size
        flat = cache.flatten(3)  # [num_blocks, num_kv_heads, 2, numbers and scales], or K and V before heads
        numbers, scales = flat[..., : size * head], flat[..., size * head :]
        if self.is_tiled(head):
            keys = numbers[:, :, 0].unflatten(-1, (head // words, size, words))
            values = numbers[:, :, 1].unflatten(-1, (size // words, head, words))
            _copy(keys, lambda slots: (slots // size, ..., slots % size, slice(None)), source, target)
            _copy(values, lambda slots: _value_index(slots, size, words), source, target)
        else:
            rows = numbers.unflatten(-1, (size, head))
            _copy(rows, lambda slots: (slots // size, ..., slots % size, slice(None)), source, target)
        if self.is_quantised:
            parts = scales.unflatten(-1, (size, 4))
            _copy(parts, lambda slots: (slots // size, ..., slots % size, slice(None)), source, target)


def _value_index(slots: Tensor, size: int, words: int) -> tuple[Any, ...]:
    offsets = slots % size
    return slots // size, slice(None), offsets // words, slice(None), offsets % words


def _copy(view: Tensor, index: Callable[[Tensor], tuple[Any, ...]], source: Tensor, target: Tensor) -> None:
    view[index(target)] = view[index(source)]  # what is read is a copy
