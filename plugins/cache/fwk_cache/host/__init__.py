"""K/V in the memory of the worker's process."""

from __future__ import annotations

from fwk import CacheTierSpec, Options, hookimpl, option


class HostOptions(Options):
    """Options of ``cache_tiers.host``."""

    hicache_size: float | None = option(
        None,
        "Host memory for K/V, in gigabytes, of each worker (default: from --hicache-ratio).",
        gt=0,
        le=2**20,
        stability="beta",
    )
    hicache_ratio: float = option(
        2.0, "Host memory for K/V, as a multiple of the device's KV cache; 0: none.", ge=0, le=1000, stability="beta"
    )


@hookimpl
def cache_tiers() -> list[CacheTierSpec]:
    return [
        CacheTierSpec(
            name="host",
            load="fwk_cache.host.tier:HostTier",
            options=HostOptions,
            outlives_process=False,
            summary="host memory; forgotten when the server stops",
        )
    ]
