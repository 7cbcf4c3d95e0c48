"""Operators by kernels of our own in Triton: on CUDA devices, and anywhere in Triton's interpreter, slowly."""

from __future__ import annotations

import os

from fwk import Facts, Needs, OperatorsSpec, hookimpl

ON_CUDA = Needs(compute_capability=(8, 0))


class TritonOperatorsSpec(OperatorsSpec):
    """Needs a device that Triton compiles for, or the interpreter, which the user must have asked for."""

    def refusal(self, facts: Facts) -> str | None:
        if facts.host.device == "cuda":
            return ON_CUDA.refusal(facts.host) or super().refusal(facts)
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "needs a cuda device, or TRITON_INTERPRET=1 to run its kernels in Triton's slow interpreter"
        return super().refusal(facts)


@hookimpl
def operators() -> list[OperatorsSpec]:
    return [
        TritonOperatorsSpec(
            name="triton",
            load="fwk_operators.triton_ops.backend:TritonOperators",
            needs=Needs(packages=("triton>=3.4",)),
            rank=-10,  # below torch until a GPU has shown that they are right
            summary="One launch each by own Triton kernels for CUDA; so far run in Triton's interpreter only.",
        )
    ]
