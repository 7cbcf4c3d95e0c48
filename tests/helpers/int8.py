"""Products of 8-bit integers: exact ones, and those of a processor that adds pairs of products in 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from fwk_quant._common.int8_product import saturates


def exact(x: Tensor, weight: Tensor) -> Tensor:
    """x: [m, k] int8 or uint8; weight: [k, n] int8; to [m, n] int32."""
    return (x.double() @ weight.double()).int()


def saturating(x: Tensor, weight: Tensor) -> Tensor:
    """What oneDNN makes of them without VNNI, for an even k: vpmaddubsw, for which int8 is shifted to uint8."""
    offset = 128 if x.dtype == torch.int8 else 0
    pairs = (x.int() + offset).view(len(x), -1, 2)
    sums = torch.einsum("mkp,kpn->mkn", pairs, weight.int().view(-1, 2, weight.shape[1])).clamp(-(2**15), 2**15 - 1)
    return (sums.sum(1) - offset * weight.int().sum(0)).int()


@contextmanager
def int_mm(product: Callable[[Tensor, Tensor], Tensor] | None) -> Iterator[None]:
    """``torch._int_mm`` is replaced, and looked at again; None: it is left."""
    with pytest.MonkeyPatch.context() as patch:
        if product is not None:
            patch.setattr(torch, "_int_mm", product)
        saturates.cache_clear()
        yield
    saturates.cache_clear()
