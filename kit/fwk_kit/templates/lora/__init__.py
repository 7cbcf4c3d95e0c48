"""LoRA by a loop over the adapters of a step."""

from __future__ import annotations

from fwk import LoRABackendSpec, hookimpl


@hookimpl
def lora_backends() -> list[LoRABackendSpec]:
    return [
        LoRABackendSpec(
            name="mine",
            load="fwk_mine.plugin:MineLoRA",
            summary="loRA by a loop over the adapters of a step",
        )
    ]
