"""Mixtral: Mistral's shape with experts."""

from fwk import ModelSpec, hookimpl


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="mixtral",
            load="fwk_models.mixtral.model:Mixtral",
            architectures=("MixtralForCausalLM",),
            summary="Llama's shape; in place of each MLP a mixture of experts.",
        )
    ]
