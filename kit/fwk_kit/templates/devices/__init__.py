"""The CPU, sparing with its memory."""

from __future__ import annotations

from fwk import DeviceSpec, hookimpl


@hookimpl
def devices() -> list[DeviceSpec]:
    return [
        DeviceSpec(
            name="mine",
            load="fwk_mine.plugin:MineDevice",
            is_automatic=False,
            summary="the CPU, sparing with its memory",
        )
    ]
