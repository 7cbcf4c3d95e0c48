"""Operators by kernels of our own in Triton: on CUDA devices, and anywhere in Triton's interpreter, slowly."""

from __future__ import annotations

from fwk import Needs, OperatorsSpec, hookimpl
from fwk.interfaces.declaration import InterpretedKernels


class TritonOperatorsSpec(InterpretedKernels, OperatorsSpec):
    """Needs a device that Triton compiles for, or its interpreter."""

    on_device = Needs(device="cuda", compute_capability=(8, 0))
    interpreter = "TRITON_INTERPRET"


@hookimpl
def operators() -> list[OperatorsSpec]:
    return [
        TritonOperatorsSpec(
            name="triton",
            load="fwk_operators.triton_ops.backend:TritonOperators",
            needs=Needs(packages=("triton>=3.4",)),
            offers=frozenset({"deterministic"}),
            rank=-10,  # below torch until a GPU has shown that they are right
            summary="One launch each by own Triton kernels for CUDA; so far run in Triton's interpreter only.",
        )
    ]
