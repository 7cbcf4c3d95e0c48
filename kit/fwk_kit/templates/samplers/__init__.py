"""Picks by the sum of probabilities."""

from __future__ import annotations

from fwk import SamplerSpec, hookimpl


@hookimpl
def samplers() -> list[SamplerSpec]:
    return [
        SamplerSpec(
            name="mine",
            load="fwk_mine.plugin:MineSampler",
            summary="picks by the sum of probabilities",
        )
    ]
