"""K/V in a Redis server that several servers share."""

from __future__ import annotations

from fwk import CacheTierSpec, Options, hookimpl, option


class RedisOptions(Options):
    """Options of ``cache_tiers.redis``."""

    hicache_redis_url: str = option(
        "redis://127.0.0.1:6379/0",
        "Redis server for K/V: redis://HOST:PORT/DB, rediss:// with TLS, or unix:///PATH. Give it a maxmemory and the "
        "policy allkeys-lru: it decides what is forgotten.",
        min_length=1,
        max_length=1024,
        stability="experimental",
    )
    hicache_redis_user: str | None = option(
        None, "User name for that server.", min_length=1, max_length=256, stability="experimental"
    )
    hicache_redis_password: str | None = option(
        None, "Password for that server.", is_secret=True, min_length=1, max_length=1024, stability="experimental"
    )
    hicache_redis_timeout: float = option(
        0.25,
        "Seconds an answer of that server may take; after that it is left alone for ten seconds, so a server that is "
        "down delays a request by this much at most.",
        gt=0,
        le=10,
        stability="experimental",
    )
    hicache_redis_ttl: int = option(
        86_400,
        "Seconds after which that server forgets an entry.",
        ge=1,
        le=31_536_000,
        stability="experimental",
    )


@hookimpl
def cache_tiers() -> list[CacheTierSpec]:
    return [
        CacheTierSpec(
            name="redis",
            load="fwk_cache.redis.tier:RedisTier",
            options=RedisOptions,
            summary="a Redis server, shared by several servers of one model",
        )
    ]
