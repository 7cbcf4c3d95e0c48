"""Phi-3, Phi-3.5 and Phi-4."""

from fwk import ModelSpec, hookimpl


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="phi3",
            load="fwk_models.phi3.model:Phi3",
            architectures=("Phi3ForCausalLM",),
            summary="Llama's shape with fused matrices; LongRoPE.",
        ),
    ]
