"""Temperature, truncation and the pick by own Triton kernels: on CUDA devices, and anywhere in its interpreter."""

from __future__ import annotations

from fwk import Needs, SamplerSpec, hookimpl
from fwk.interfaces.declaration import InterpretedKernels


class TritonSamplerSpec(InterpretedKernels, SamplerSpec):
    """Needs a device that Triton compiles for, or its interpreter."""

    on_device = Needs(device="cuda", compute_capability=(8, 0))
    interpreter = "TRITON_INTERPRET"


@hookimpl
def samplers() -> list[SamplerSpec]:
    return [
        TritonSamplerSpec(
            name="triton",
            load="fwk_sampling.triton_sampler.sampler:TritonSampler",
            needs=Needs(packages=("triton>=3.4",)),
            finishes=("temperature", "truncation"),
            late_positions=True,
            rank=-10,  # below torch until a GPU has shown that the kernels are right
            summary="Own Triton kernels that temper, truncate without a sort and pick, in two launches and without a "
            "wait; so far run in Triton's interpreter only.",
        )
    ]
