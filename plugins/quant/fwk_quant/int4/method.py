"""Four-bit weights."""

from __future__ import annotations

from fwk_quant._common.method import IntegerMethod
from fwk_quant._common.options import Activations, GemmBackend


class Int4Method(IntegerMethod):
    """Groups of the options' size when quantised while loading, with or without zero points."""

    bits = 4

    @property
    def activations(self) -> Activations:
        return self.context.options.int4_activations

    @property
    def gemm_backend(self) -> GemmBackend:
        return self.context.options.int4_gemm_backend

    @property
    def group_size(self) -> int:
        return self.context.options.int4_group_size

    @property
    def has_zeros(self) -> bool:
        return self.context.options.int4_zero_point
