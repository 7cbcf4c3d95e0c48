"""Eight-bit weights, a scale for each row."""

from __future__ import annotations

from fwk import QuantizerSpec, hookimpl


@hookimpl
def quantizers() -> list[QuantizerSpec]:
    return [
        QuantizerSpec(
            name="mine",
            load="fwk_mine.plugin:MineQuant",
            api=2,
            layouts=("plain",),
            summary="eight-bit weights, a scale for each row",
        )
    ]
