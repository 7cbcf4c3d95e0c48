"""The sampler for CPUs, and for any device torch reaches."""

from __future__ import annotations

from fwk import Needs, SamplerSpec, hookimpl


@hookimpl
def samplers() -> list[SamplerSpec]:
    return [
        SamplerSpec(
            name="torch",
            load="fwk_sampling.torch_sampler.sampler:TorchSampler",
            needs=Needs(dtypes=("float64",)),
            late_positions=True,
            rank=10,
            summary="Inverse CDF with one uniform number per token, made from seed and position.",
        )
    ]
