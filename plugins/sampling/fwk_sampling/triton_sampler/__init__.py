"""Temperature, truncation and the pick by own Triton kernels: on CUDA devices, and anywhere in its interpreter."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fwk import Facts, Needs, SamplerSpec, hookimpl

ON_CUDA = Needs(compute_capability=(8, 0))


@dataclass(frozen=True, kw_only=True)
class TritonSamplerSpec(SamplerSpec):
    """Needs a device that Triton compiles for, or the interpreter, which the user must have asked for."""

    def refusal(self, facts: Facts) -> str | None:
        if facts.host.device == "cuda":
            return ON_CUDA.refusal(facts.host) or super().refusal(facts)
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "needs a cuda device, or TRITON_INTERPRET=1 to run its kernels in Triton's slow interpreter"
        return super().refusal(facts)


@hookimpl
def samplers() -> list[SamplerSpec]:
    return [
        TritonSamplerSpec(
            name="triton",
            load="fwk_sampling.triton_sampler.sampler:TritonSampler",
            needs=Needs(packages=("triton>=3.4",)),
            finishes=("temperature", "truncation"),
            rank=-10,  # below torch until a GPU has shown that the kernels are right
            summary="Own Triton kernels that temper, truncate without a sort and pick, in two launches and without a "
            "wait; so far run in Triton's interpreter only.",
        )
    ]
