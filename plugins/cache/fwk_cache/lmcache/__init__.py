"""K/V in an LMCache server that several servers share, by its protocol: no package of LMCache's is needed here."""

from __future__ import annotations

from fwk import CacheTierSpec, Options, hookimpl, option


class LMCacheOptions(Options):
    """Options of ``cache_tiers.lmcache``."""

    hicache_lmcache_url: str = option(
        "lm://127.0.0.1:65432",
        "LMCache server for K/V, as LMCache's remote_url says it: lm://HOST:PORT, started by lmcache_server HOST PORT. "
        "It asks for no password, does not encrypt, and keeps everything until it ends.",
        min_length=1,
        max_length=1024,
        stability="experimental",
    )
    hicache_lmcache_timeout: float = option(
        0.25,
        "Seconds an answer of that server may take; after that it is left alone for ten seconds, so a server that is "
        "down delays a request by this much at most.",
        gt=0,
        le=10,
        stability="experimental",
    )


@hookimpl
def cache_tiers() -> list[CacheTierSpec]:
    return [
        CacheTierSpec(
            name="lmcache",
            load="fwk_cache.lmcache.tier:LMCacheTier",
            options=LMCacheOptions,
            summary="an LMCache server, shared by several servers of one model",
        )
    ]
