"""OLMoE."""

from fwk import ModelSpec, hookimpl


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="olmoe",
            load="fwk_models.olmoe.model:Olmoe",
            architectures=("OlmoeForCausalLM",),
            summary="Queries and keys normalised over all heads; in place of each MLP a mixture of experts.",
        )
    ]
