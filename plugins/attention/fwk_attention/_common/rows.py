"""K/V as rows of a cache [num_blocks, parts, num_kv_heads, block_size, row_size]: one row per token and KV head.

Two parts, K and V; or one, in a latent layer. In half or single precision a row is the head's numbers. Quantised, it is
bytes: one per number, padding to a multiple of four, and last the float32 number they are to be multiplied with. So a
block is all there is to know of its tokens, and copying rows copies them whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from fwk.interfaces.attention import AttentionContext, AttentionLayer, BlockFormat, KVKind, KVSpec

if TYPE_CHECKING:
    from torch import Tensor

KV_DTYPES = ("auto", "int8", "fp8_e4m3")

SMALLEST_SCALE = 1e-30
"""Scale of a row of zeros, which no other scale may fall below: dividing by it stays finite."""


class Rows(ABC):
    """How the numbers of one token and KV head are kept."""

    dtype: torch.dtype

    @abstractmethod
    def row_size(self, head_size: int) -> int:
        """Elements per row."""

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """[..., head_size] numbers to [..., row_size] elements."""

    @abstractmethod
    def decode(self, rows: Tensor, head_size: int) -> Tensor:
        """The numbers that ``encode`` wrote, or the nearest to them; rows are contiguous."""


class PlainRows(Rows):
    """As they are."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def row_size(self, head_size: int) -> int:
        return head_size

    def encode(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)

    def decode(self, rows: Tensor, head_size: int) -> Tensor:
        return rows


class QuantisedRows(Rows):
    """One byte per number and one scale per row: the largest number gets the format's largest value."""

    dtype = torch.uint8

    def __init__(self, dtype: torch.dtype, number: torch.dtype) -> None:
        self._dtype = dtype  # of the decoded numbers
        self._number = number
        is_float = number.is_floating_point
        self._largest = torch.finfo(number).max if is_float else float(torch.iinfo(number).max)

    def row_size(self, head_size: int) -> int:
        return quantised_row_size(head_size)

    def encode(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        numbers = x.float()
        scale = (numbers.abs().amax(-1, keepdim=True) / self._largest).clamp_(min=SMALLEST_SCALE)
        numbers = numbers / scale
        if not self._number.is_floating_point:
            numbers.round_()
        rows = torch.zeros((*x.shape[:-1], self.row_size(size)), dtype=torch.uint8, device=x.device)
        rows[..., :size] = numbers.clamp_(-self._largest, self._largest).to(self._number).view(torch.uint8)
        rows.view(torch.float32)[..., -1:] = scale
        return rows

    def decode(self, rows: Tensor, head_size: int) -> Tensor:
        scale = rows.view(torch.float32)[..., -1:]
        numbers = rows[..., :head_size].view(self._number).to(torch.float32)
        return numbers.mul_(scale).to(self._dtype)


def quantised_row_size(head_size: int) -> int:
    """Bytes: the numbers, padded so that the scale is aligned, and the scale."""
    return -(-head_size // 4) * 4 + 4


def rows_of(context: AttentionContext) -> Rows:
    """The format that the user asked for."""
    if context.kv_dtype == "auto":
        return PlainRows(context.dtype)
    return QuantisedRows(context.dtype, {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}[context.kv_dtype])


def block_format(spec: KVSpec, block_size: int, rows: Rows) -> BlockFormat:
    """A block of such rows."""
    parts = 1 if spec.kind is KVKind.LATENT else 2
    shape = (parts, spec.num_kv_heads, block_size, rows.row_size(spec.head_size))
    return BlockFormat(shape, rows.dtype, head_dim=1)


def move_rows(layers: list[AttentionLayer], source: Tensor, target: Tensor) -> None:
    """``AttentionBackend.move`` for caches of such rows."""
    for layer in layers:
        cache = layer.kv_cache
        assert cache is not None, "move before the KV cache was allocated"
        size = cache.shape[3]
        taken = cache[source // size, :, :, source % size]  # a copy: [n, parts, num_kv_heads, row_size]
        cache[target // size, :, :, target % size] = taken
