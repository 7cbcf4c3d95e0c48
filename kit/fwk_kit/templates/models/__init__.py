"""A decoder of the Llama family."""

from __future__ import annotations

from fwk import ModelSpec, hookimpl


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="mine",
            load="fwk_mine.plugin:MineModel",
            architectures=("MineForCausalLM",),
            summary="a decoder of the Llama family",
        )
    ]
