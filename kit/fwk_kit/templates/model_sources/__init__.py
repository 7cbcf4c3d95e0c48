"""Models below one folder, by name."""

from __future__ import annotations

from fwk import ModelSourceSpec, Options, hookimpl, option


class MineOptions(Options):
    """Options of ``model_sources.mine``."""

    mine_models: str = option(".", "Folder with the models that are named mine:NAME.")


@hookimpl
def model_sources() -> list[ModelSourceSpec]:
    return [
        ModelSourceSpec(
            name="mine",
            load="fwk_mine.plugin:MineSource",
            options=MineOptions,
            summary="models below one folder, by name",
        )
    ]
