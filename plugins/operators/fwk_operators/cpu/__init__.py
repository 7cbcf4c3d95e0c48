"""Operators on a CPU by kernels of our own, each fused into one pass."""

from dataclasses import dataclass
from pathlib import Path

import fwk_native as native
from fwk import Needs, OperatorsSpec, hookimpl
from fwk.interfaces.declaration import Facts


@dataclass(frozen=True, kw_only=True)
class CpuOperatorsSpec(OperatorsSpec):
    """Needs a compiler besides what the declaration says."""

    def refusal(self, facts: Facts) -> str | None:
        return super().refusal(facts) or native.refusal()


@hookimpl
def operators() -> list[OperatorsSpec]:
    return [
        CpuOperatorsSpec(
            name="cpu",
            load="fwk_operators.cpu.backend:CpuOperators",
            needs=Needs(device="cpu"),
            dtypes=("float32", "bfloat16"),
            offers=frozenset({"deterministic", "invariant"}),
            rank=10,
            kernels=(Path(__file__).with_name("operators.cpp"),),
            summary="C++ kernels for CPUs (AVX2, AVX-512), built on first use; what a recorded step is made of.",
        )
    ]
