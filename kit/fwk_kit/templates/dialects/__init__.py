"""A prompt in, its continuation out: POST /mine/generate."""

from __future__ import annotations

from fwk import DialectSpec, hookimpl


@hookimpl
def dialects() -> list[DialectSpec]:
    return [
        DialectSpec(
            name="mine",
            load="fwk_mine.plugin:MineDialect",
            summary="a prompt in, its continuation out: POST /mine/generate",
        )
    ]
