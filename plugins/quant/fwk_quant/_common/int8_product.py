"""Products of two int8 matrices on CPUs where ``torch._int_mm`` saturates."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from fwk_quant._common.product import multiply

if TYPE_CHECKING:
    from torch import Tensor

MAX_EXACT = 1024
"""Products of two int8 numbers, each at most 2**14, whose sum is exact in float32."""


@cache
def saturates() -> bool:
    """Whether ``torch._int_mm`` gives wrong sums on this CPU.

    Without VNNI oneDNN adds pairs of 8-bit products in 16 bits, which saturate above 32767. torch avoids oneDNN on
    processors without VNNI, but not where ``ONEDNN_MAX_CPU_ISA`` keeps oneDNN from using it.
    """
    weight = torch.tensor([127, -128], dtype=torch.int8).repeat_interleave(32).unsqueeze(1).repeat(1, 64)
    for numbers in (torch.tensor([127, -128], dtype=torch.int8), torch.tensor([255, 0], dtype=torch.uint8)):
        x = numbers.repeat(8).unsqueeze(1).repeat(1, 64)
        for count in (1, 16):
            wanted = (x[:count].double() @ weight.double()).int()
            if not torch.equal(torch._int_mm(x[:count], weight), wanted):  # pyright: ignore[reportPrivateImportUsage]
                return True
    return False


def multiply_int8(x: Tensor, weight: Tensor) -> Tensor:
    """The exact ``x @ weight.T``, by products in float32.

    x: [num_tokens, in_features] int8; weight: [out_features, in_features] int8; to [num_tokens, out_features] int32.
    """
    sums = x.new_zeros(len(x), len(weight), dtype=torch.int32)
    for part, columns in zip(x.split(MAX_EXACT, 1), weight.split(MAX_EXACT, 1), strict=True):

        def dense(start: int, stop: int, columns: Tensor = columns) -> Tensor:
            return columns[start:stop].float()

        sums += multiply(part.float(), (len(weight), part.shape[1]), dense, None).int()
    return sums
