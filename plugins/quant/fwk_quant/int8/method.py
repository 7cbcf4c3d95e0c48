"""Eight-bit weights."""

from __future__ import annotations

from fwk.interfaces.quant import ALL
from fwk_quant._common.method import IntegerMethod
from fwk_quant._common.options import Activations, GemmBackend


class Int8Method(IntegerMethod):
    """Symmetric, with a scale per output feature, when quantised while loading."""

    bits = 8

    @property
    def activations(self) -> Activations:
        return self.context.options.int8_activations

    @property
    def gemm_backend(self) -> GemmBackend:
        return self.context.options.int8_gemm_backend

    @property
    def group_size(self) -> int:
        return ALL
