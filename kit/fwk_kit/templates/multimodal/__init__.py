"""Grey pictures, a token for each point."""

from __future__ import annotations

from fwk import MultimodalProcessorSpec, hookimpl


@hookimpl
def multimodal_processors() -> list[MultimodalProcessorSpec]:
    return [
        MultimodalProcessorSpec(
            name="mine",
            api=2,
            load="fwk_mine.plugin:MineProcessor",
            architectures=("MineForCausalLM",),
            kinds=frozenset({"image"}),
            summary="grey pictures, a token for each point",
        )
    ]
