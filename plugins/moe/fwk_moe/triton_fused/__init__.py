"""Mixture of experts by kernels of our own in Triton: on CUDA devices, and anywhere in its interpreter, slowly."""

from __future__ import annotations

import os

from fwk import Facts, MoERunnerSpec, Needs, hookimpl

ON_CUDA = Needs(compute_capability=(8, 0))


class TritonRunnerSpec(MoERunnerSpec):
    """Needs a device that Triton compiles for, or the interpreter, which the user must have asked for."""

    def refusal(self, facts: Facts) -> str | None:
        if facts.host.device == "cuda":
            return ON_CUDA.refusal(facts.host) or super().refusal(facts)
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "needs a cuda device, or TRITON_INTERPRET=1 to run its kernels in Triton's slow interpreter"
        return super().refusal(facts)


@hookimpl
def moe_runners() -> list[MoERunnerSpec]:
    return [
        TritonRunnerSpec(
            name="triton",
            load="fwk_moe.triton_fused.runner:TritonRunner",
            needs=Needs(packages=("triton>=3.4",)),
            rank=-10,  # below torch until a GPU has shown that the kernels are right
            summary="Tokens sorted by expert on the device and multiplied in groups, without a wait; plain, int8, int4 "
            "and fp8 weights. So far run in Triton's interpreter only.",
        )
    ]
