"""Adapters in single safetensors files."""

from __future__ import annotations

from fwk import LoRASourceSpec, Options, hookimpl, option


class MineOptions(Options):
    """Options of ``lora_sources.mine``."""

    mine_adapters: str = option("", "Folder with a folder for each adapter; empty: none.")


@hookimpl
def lora_sources() -> list[LoRASourceSpec]:
    return [
        LoRASourceSpec(
            name="mine",
            load="fwk_mine.plugin:MineSource",
            options=MineOptions,
            summary="adapters in single safetensors files",
        )
    ]
