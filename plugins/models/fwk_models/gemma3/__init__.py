"""Gemma 3, text only."""

from fwk import ModelSpec, hookimpl


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="gemma3",
            load="fwk_models.gemma3.model:Gemma3",
            architectures=("Gemma3ForCausalLM",),
            summary="Sliding-window and global layers in turn, each kind with its own rotary base.",
        )
    ]
