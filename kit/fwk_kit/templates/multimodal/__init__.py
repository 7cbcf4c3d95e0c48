"""Grey pictures, a token for each point."""

from __future__ import annotations

from fwk import ModelSpec, MultimodalProcessorSpec, hookimpl


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


@hookimpl
def models() -> list[ModelSpec]:
    """The model that takes them. Leave it out where another package has the model already."""
    return [
        ModelSpec(
            name="mine",
            load="fwk_mine.model:MineModel",
            architectures=("MineForCausalLM",),
            media=frozenset({"image"}),
            summary="a decoder of attention alone that takes grey pictures",
        )
    ]
