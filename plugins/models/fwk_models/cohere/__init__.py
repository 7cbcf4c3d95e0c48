"""Command R, Command R+, Command R7B, Aya."""

from fwk import ModelSpec, hookimpl


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="cohere",
            load="fwk_models.cohere.model:Cohere",
            architectures=(
                "CohereForCausalLM",
                "Cohere2ForCausalLM",
            ),
            summary="Attention and MLP side by side below one norm; Command R7B has windows.",
        ),
    ]
