"""K/V outside the device: blocks go to cache tiers and come back, for a prefix cache that uses them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fwk import FeatureSpec, Options, PrefixCacheSpec, hookimpl, option
from fwk.errors import ConfigError
from fwk.interfaces.feature import FeatureRun


class TiersOptions(Options):
    """Options of ``features.cache_tiers``."""

    cache_tiers: tuple[str, ...] = option(
        (),
        "Stores of K/V outside the device, fastest first, for a prefix cache that uses them; its own come before.",
        aliases=["hicache-storage-backend"],
        stability="beta",
    )


def tiers_of(cache: PrefixCacheSpec, options: TiersOptions) -> tuple[str, ...]:
    """Names of the tiers of a run, fastest first: those that the prefix cache brings, then those that are given."""
    return () if cache.tiers is None else tuple(dict.fromkeys((*cache.tiers, *options.cache_tiers)))


@dataclass(frozen=True, kw_only=True)
class TiersSpec(FeatureSpec):
    """Idle where the prefix cache uses no tiers."""

    def names_used(self, run: FeatureRun, options: TiersOptions) -> Iterable[tuple[str, str]]:
        return [("cache_tiers", name) for name in tiers_of(_cache(run), options)]

    def check_run(self, run: FeatureRun, options: TiersOptions) -> None:
        cache, given = _cache(run), f"--cache-tiers {' '.join(options.cache_tiers)}"
        if options.cache_tiers and run.has_encoder:
            raise ConfigError(
                f"{given}: {run.model} has an encoder and a decoder, and each K/V of a prompt depends on all of it"
            )
        if options.cache_tiers and run.prompts is not None and run.prompts.needs_whole_prompts:
            what = "makes embeddings" if run.task == "embed" else f"is served to {run.task}"
            raise ConfigError(f"{given}: {run.model} {what}, which keeps no K/V")
        if options.cache_tiers and cache.tiers is None:
            able = [item.name for item in run.items("cache") if item.declaration.tiers is not None]
            raise ConfigError(
                f"{given}: the prefix cache '{cache.name}' uses no tiers; choose with --prefix-cache one that does "
                f"({', '.join(able) or 'none is installed'}), or leave --cache-tiers out"
            )
        if cache.tiers is not None and run.is_recurrent:
            raise ConfigError(
                f"--prefix-cache {cache.name}: {run.model} has recurrent layers, and tiers keep no states"
            )


def _cache(run: FeatureRun) -> PrefixCacheSpec:
    cache = run.chosen["cache"]
    assert isinstance(cache, PrefixCacheSpec)
    return cache


@hookimpl
def features() -> list[FeatureSpec]:
    return [
        TiersSpec(
            name="cache_tiers",
            transfer="fwk_cache.tiers.transfer:WorkerTransfer",
            worker="fwk_cache.tiers.worker:Tiers",
            options=TiersOptions,
            runners=("generate", "pool"),
            changes_kv=False,
            uses=(("cache_tiers", "cache_tiers"),),
            summary="K/V that leave the device are kept in cache tiers, for a prefix cache that uses them",
        )
    ]
