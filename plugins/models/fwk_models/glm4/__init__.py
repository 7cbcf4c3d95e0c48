"""GLM-4."""

from fwk import ModelSpec, hookimpl


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="glm4",
            load="fwk_models.glm4.model:Glm4",
            architectures=(
                "GlmForCausalLM",
                "Glm4ForCausalLM",
            ),
            summary="Rotary positions on half of each head, neighbours as pairs; GLM-4-0414 has norms on both sides.",
        ),
    ]
