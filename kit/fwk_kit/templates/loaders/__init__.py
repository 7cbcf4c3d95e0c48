"""Checkpoints of numpy arrays."""

from __future__ import annotations

from fwk import LoaderSpec, hookimpl


@hookimpl
def loaders() -> list[LoaderSpec]:
    return [
        LoaderSpec(
            name="mine",
            load="fwk_mine.plugin:MineLoader",
            summary="checkpoints of numpy arrays",
        )
    ]
