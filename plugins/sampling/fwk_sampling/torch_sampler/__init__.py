"""The sampler for CPUs, and for any device torch reaches."""

from __future__ import annotations

from fwk import SamplerSpec, hookimpl


@hookimpl
def samplers() -> list[SamplerSpec]:
    return [
        SamplerSpec(
            name="torch",
            load="fwk_sampling.torch_sampler.sampler:TorchSampler",
            rank=10,
            summary="Inverse CDF with one uniform number per token, made from seed and position.",
        )
    ]
