"""SmolLM3."""

from fwk import ModelSpec, hookimpl


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="smollm3",
            load="fwk_models.smollm3.model:SmolLM3",
            architectures=("SmolLM3ForCausalLM",),
            summary="Llama's shape; every fourth layer has no positions.",
        ),
    ]
