"""Temperature, truncation and the pick in one native operator: the logits of a row are read two or three times."""

from dataclasses import dataclass
from pathlib import Path

import fwk_native as native
from fwk import Needs, SamplerSpec, hookimpl
from fwk.interfaces.declaration import Facts


@dataclass(frozen=True, kw_only=True)
class CpuSamplerSpec(SamplerSpec):
    """Needs a compiler besides what the declaration says."""

    def refusal(self, facts: Facts) -> str | None:
        return super().refusal(facts) or native.refusal()


@hookimpl
def samplers() -> list[SamplerSpec]:
    return [
        CpuSamplerSpec(
            name="cpu",
            load="fwk_sampling.cpu_sampler.sampler:CpuSampler",
            needs=Needs(device="cpu"),
            finishes=("temperature", "truncation"),
            rank=20,
            kernels=(Path(__file__).with_name("sampler.cpp"),),
            summary="A C++ kernel for CPUs that truncates and picks in one go, built on first use.",
        )
    ]
