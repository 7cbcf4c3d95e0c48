"""Instruction sets that kernels are tested with."""

from __future__ import annotations

from typing import Any

import pytest

from fwk import native


def isa_params(*others: Any) -> list[Any]:
    """The machine's instruction sets as parameters; all but AVX2 and the best are slow.

    Each takes a compiler several seconds a kernel. others: parameters that follow.
    """
    machine = native.isas()
    usual = {machine[-1], "avx2"}
    return [*(isa if isa in usual else pytest.param(isa, marks=pytest.mark.slow) for isa in machine), *others]
