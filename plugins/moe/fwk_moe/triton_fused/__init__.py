"""Mixture of experts by kernels of our own in Triton: on CUDA devices, and anywhere in its interpreter, slowly."""

from __future__ import annotations

from fwk import MoERunnerSpec, Needs, hookimpl
from fwk.interfaces.declaration import DETERMINISTIC, InterpretedKernels
from fwk.interfaces.moe import EXPERT_PARALLEL, GRAPH_CAPTURE


class TritonRunnerSpec(InterpretedKernels, MoERunnerSpec):
    """Needs a device that Triton compiles for, or its interpreter."""

    on_device = Needs(device="cuda", compute_capability=(8, 0))
    interpreter = "TRITON_INTERPRET"


@hookimpl
def moe_runners() -> list[MoERunnerSpec]:
    return [
        TritonRunnerSpec(
            name="triton",
            load="fwk_moe.triton_fused.runner:TritonRunner",
            needs=Needs(packages=("triton>=3.4",)),
            offers=frozenset({DETERMINISTIC, EXPERT_PARALLEL, GRAPH_CAPTURE}),
            rank=-10,  # below torch until a GPU has shown that the kernels are right
            summary="Tokens sorted by expert on the device and multiplied in groups, without a wait; plain, int8, int4 "
            "and fp8 weights, the last by fp8 activations where a device can. So far in Triton's interpreter only.",
        )
    ]
