"""K/V in files of a folder."""

from __future__ import annotations

from fwk import CacheTierSpec, Options, hookimpl, option


class FileOptions(Options):
    """Options of ``cache_tiers.file``."""

    hicache_storage_dir: str | None = option(
        None,
        "Folder for K/V, readable by its owner only; servers may share it, and find what others left (default: fwk/kv "
        "in the user's cache folder).",
        stability="beta",
    )
    hicache_storage_size: float = option(
        10.0,
        "Size of that folder in gigabytes; the least recently used files go first.",
        gt=0,
        le=2**20,
        stability="beta",
    )


@hookimpl
def cache_tiers() -> list[CacheTierSpec]:
    return [
        CacheTierSpec(
            name="file",
            load="fwk_cache.file.tier:FileTier",
            options=FileOptions,
            summary="files of a folder; found again after a restart",
        )
    ]
