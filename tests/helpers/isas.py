"""Instruction sets that kernels are tested with."""

from __future__ import annotations

from typing import Any

import pytest

import fwk_native as native


def isa_params(*others: Any, least: str = "plain") -> list[Any]:
    """The machine's instruction sets from ``least`` on as parameters; all but AVX2 and the best are slow.

    Each takes a compiler several seconds a kernel. others: parameters that follow.
    """
    order = list(native.ISA_NEEDS)
    machine = [isa for isa in native.isas() if order.index(isa) >= order.index(least)]
    usual = {native.isas()[-1], "avx2"}
    return [*(isa if isa in usual else pytest.param(isa, marks=pytest.mark.sweep) for isa in machine), *others]
