"""Weights as the CPU's kernels read them, kept in a folder and mapped by the next start."""

from __future__ import annotations

from fwk import FeatureSpec, Options, hookimpl, option


class WeightsCacheOptions(Options):
    """Options of ``features.weights_cache``."""

    weights_cache: str = option(
        "auto",
        "Folder that keeps weights as the CPU's kernels read them, so that the next start maps them; auto: "
        "fwk/weights in the user's cache folder, for models of 600 MiB or more; none: nothing is kept.",
        stability="beta",
    )
    weights_cache_size: float = option(
        64.0,
        "GiB that files in --weights-cache may take; those used longest ago are removed.",
        stability="beta",
        gt=0,
        le=2**20,
    )


@hookimpl
def features() -> list[FeatureSpec]:
    return [
        FeatureSpec(
            name="weights_cache",
            worker="fwk_features.weights_cache.worker:WeightsCachePart",
            options=WeightsCacheOptions,
            runners=("generate", "pool"),
            changes_kv=False,
            summary="packed weights of an earlier start, mapped (--weights-cache, on a CPU)",
        )
    ]
