"""Paged attention in tiles of keys."""

from __future__ import annotations

from fwk import AttentionBackendSpec, Options, hookimpl, option


class TiledOptions(Options):
    """Options of ``attention.tiled``."""

    tiled_keys: int = option(512, "Keys looked at together; fewer take less memory and more time.", ge=1, le=65536)


@hookimpl
def attention_backends() -> list[AttentionBackendSpec]:
    return [
        AttentionBackendSpec(
            name="tiled",
            load="fwk_tiled_attention.backend:TiledAttention",
            features=frozenset({"sliding_window", "soft_cap", "tree_mask"}),
            options=TiledOptions,
            summary="attention in tiles of keys, with a bound on memory",
        )
    ]
