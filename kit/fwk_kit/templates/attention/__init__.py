"""Paged attention by loops."""

from __future__ import annotations

from fwk import AttentionBackendSpec, hookimpl


@hookimpl
def attention_backends() -> list[AttentionBackendSpec]:
    return [
        AttentionBackendSpec(
            name="mine",
            load="fwk_mine.plugin:MineAttention",
            features=frozenset({"sliding_window", "soft_cap"}),
            summary="paged attention by loops",
        )
    ]
