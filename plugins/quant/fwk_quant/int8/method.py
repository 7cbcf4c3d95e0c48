"""Eight-bit weights, 16-bit or 32-bit activations."""

from __future__ import annotations

from fwk.interfaces.quant import ALL
from fwk_quant._common.method import IntegerMethod


class Int8Method(IntegerMethod):
    """Symmetric, with a scale per output feature, when quantised while loading."""

    bits = 8

    @property
    def group_size(self) -> int:
        return ALL
