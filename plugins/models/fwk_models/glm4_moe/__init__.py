"""GLM-4.5 and 4.6."""

from fwk import ModelSpec, hookimpl


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="glm4_moe",
            load="fwk_models.glm4_moe.model:Glm4Moe",
            architectures=("Glm4MoeForCausalLM",),
            summary="Half of each head turns; experts routed as in DeepSeek-V3, behind the first dense layers.",
        )
    ]
