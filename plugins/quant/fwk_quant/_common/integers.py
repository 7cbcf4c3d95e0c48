"""Matrices of 8-bit or 4-bit integers with a scale per row or per group of a row.

The value of number q in a group is ``(q - zero) * scale``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fwk.interfaces.quant import PackedNumbers
from fwk_quant._common.product import multiply
from fwk_quant._linear_cpu.integers import Integers, rounded_together

if TYPE_CHECKING:
    from torch import Tensor

MIDDLE = 8
"""The zero of four-bit numbers without a zero point."""

MAX_SMALL_TOKENS = 8
"""Up to here torch's own kernel for bfloat16 and 8-bit integers is faster: 4 times with one token, equal with 16."""


@dataclass(frozen=True, slots=True)
class IntegerMatrix:
    """One matrix, packed.

    packed: [rows, columns] int8; or, of four bits, [rows, columns / 2] uint8, whose low halves are the first half of
    a row's columns and whose high halves are the second. scales: [rows, groups]. zeros: [rows, groups] int16 for eight
    bits, uint8 for four; None: 0 and ``MIDDLE``. group_of: [columns] int64 where groups are no runs of columns.
    """

    bits: int
    packed: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    group_of: Tensor | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.packed.shape[0], self.packed.shape[1] * (8 // self.bits)

    def dense(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Rows ``start`` to ``stop`` as numbers; computed in float32 and rounded once."""
        numbers = self._numbers(start, stop)
        zeros = None if self.zeros is None else self.zeros[start:stop]
        scales = self.scales[start:stop].float()
        if self.group_of is None:
            grouped = numbers.unflatten(1, (scales.shape[1], -1))
            zeros = None if zeros is None else zeros.unsqueeze(-1)
            scales = scales.unsqueeze(-1)
        else:
            grouped = numbers
            zeros = None if zeros is None else zeros[:, self.group_of]
            scales = scales[:, self.group_of]
        if zeros is not None:
            grouped.sub_(zeros)
        elif self.bits == 4:
            grouped.sub_(MIDDLE)
        grouped.mul_(scales)
        return numbers.to(dtype)

    def _numbers(self, start: int, stop: int) -> Tensor:
        """float32."""
        packed = self.packed[start:stop]
        if self.bits == 8:
            return packed.float()
        half = packed.shape[1]
        numbers = torch.empty(packed.shape[0], 2 * half, device=packed.device)
        numbers[:, :half] = packed & 15
        numbers[:, half:] = packed >> 4
        return numbers

    def in_order(self) -> tuple[IntegerMatrix, Tensor | None]:
        """The same with groups that are runs of columns, and the column at each place; itself where that cannot be."""
        if self.group_of is None:
            return self, None
        num_groups = self.scales.shape[1]
        counts = torch.bincount(self.group_of, minlength=num_groups)
        if not bool((counts == self.size[1] // num_groups).all()) or self.size[1] % num_groups:
            return self, None
        columns = self.group_of.argsort(stable=True)
        packed = self.packed
        numbers = packed if self.bits == 8 else torch.cat((packed & 15, packed >> 4), dim=1)
        return IntegerMatrix(self.bits, pack(numbers[:, columns], self.bits), self.scales, self.zeros), columns

    def unsigned(self) -> Callable[[int, int], Integers] | None:
        """The same for the native kernel, by slices of rows; None where it does not do such groups."""
        columns = self.size[1]
        group = columns // self.scales.shape[1]
        if self.group_of is not None or rounded_together(self.bits, columns, group) is None:
            return None
        if self.bits == 8:
            zero, zeros = 128, None if self.zeros is None else (self.zeros + 128).to(torch.uint8)
        else:
            zero, zeros = MIDDLE, self.zeros
        half = self.scales.half()
        scales = half if torch.equal(half.float(), self.scales.float()) else self.scales.float()

        def rows(start: int, stop: int) -> Integers:
            packed = self.packed[start:stop]
            is_byte = self.bits == 8
            numbers = packed.view(torch.uint8) ^ 128 if is_byte else torch.cat((packed & 15, packed >> 4), dim=1)
            return Integers(self.bits, numbers, group, scales[start:stop], zero if zeros is None else zeros[start:stop])

        return rows

    def for_kernels(self) -> PackedNumbers | None:
        """The same for kernels of other plugins; None where groups are no runs of columns."""
        if self.group_of is not None:
            return None
        group_size = self.size[1] // self.scales.shape[1]
        return PackedNumbers(f"int{self.bits}", self.packed, self.scales, self.zeros, group_size=group_size)

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [num_tokens, columns] to [num_tokens, rows]."""
        if self.bits == 4 or self.zeros is not None or self.scales.shape[1] > 1:
            return multiply(x, self.size, lambda start, stop: self.dense(start, stop, x.dtype), bias)
        # One scale a row and nothing to subtract: the products are scaled instead of the numbers, of which there are
        # more, and 8 bits are exact in any floating type.
        scales = self.scales.view(-1)
        if x.shape[0] <= MAX_SMALL_TOKENS and x.dtype == scales.dtype == torch.bfloat16 and x.device.type == "cpu":
            y = torch.ops.aten._weight_int8pack_mm(x.contiguous(), self.packed, scales)
            return y if bias is None else y.add_(bias)
        return multiply(x, self.size, lambda start, stop: self.packed[start:stop].to(x.dtype), bias, scales.float())


QUANTISED_AT_ONCE = 2**21
"""Numbers that are quantised together: rows do not depend on each other, and a head's in float32 would fill memory."""


def pack(numbers: Tensor, bits: int) -> Tensor:
    """numbers: [rows, columns], of eight bits signed, of four unsigned, as ``IntegerMatrix`` holds them."""
    if bits == 8:
        return numbers.to(torch.int8)
    low, high = numbers.to(torch.uint8).chunk(2, dim=1)
    return low | (high << 4)


def quantise(weight: Tensor, bits: int, group_size: int, *, has_zeros: bool = False) -> dict[str, Tensor]:
    """Round each group to the nearest of its evenly spaced levels. weight: [rows, columns]; group_size divides columns.

    Symmetric: scale = largest magnitude / 7 or 127. With zeros: the levels span the group's range, which always
    includes 0. Returns ``numbers`` [rows, columns] int8, of four bits unsigned, ``scales`` [rows, groups] in weight's
    type and, with zeros, ``zeros`` [rows, groups] uint8.
    """
    rows = weight.split(max(1, QUANTISED_AT_ONCE // max(1, weight.shape[1])))
    parts = [_quantise(some, bits, group_size, has_zeros) for some in rows]
    return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _quantise(weight: Tensor, bits: int, group_size: int, has_zeros: bool) -> dict[str, Tensor]:
    groups = weight.float().unflatten(1, (-1, group_size))
    if has_zeros:
        low, high = groups.amin(-1, keepdim=True).clamp_(max=0), groups.amax(-1, keepdim=True).clamp_(min=0)
        steps, floor = 2**bits - 1, 0
        scales = _usable((high - low) / steps, weight.dtype)
        zeros = (-low / scales).round_().clamp_(0, steps)
    else:
        steps, floor = 2 ** (bits - 1) - 1, -(2 ** (bits - 1) - 1)
        scales = _usable(groups.abs().amax(-1, keepdim=True) / steps, weight.dtype)
        zeros = torch.zeros_like(scales)
    numbers = (groups / scales).round_().add_(zeros).clamp_(floor, steps)
    if bits == 4 and not has_zeros:
        numbers.add_(MIDDLE)
    found = {"numbers": numbers.flatten(1).to(torch.int8), "scales": scales.squeeze(-1).to(weight.dtype)}
    return {**found, "zeros": zeros.squeeze(-1).to(torch.uint8)} if has_zeros else found


def _usable(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """As they will be stored, in float32; groups of zeros get a scale of one."""
    stored = scales.to(dtype).float()
    return torch.where(stored > 0, stored, torch.ones_like(stored))
