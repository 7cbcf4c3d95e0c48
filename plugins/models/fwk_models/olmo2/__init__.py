"""OLMo 2 and OLMo 3."""

from fwk import ModelSpec, hookimpl


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="olmo2",
            load="fwk_models.olmo2.model:Olmo2",
            architectures=(
                "Olmo2ForCausalLM",
                "Olmo3ForCausalLM",
            ),
            summary="Norms behind attention and MLP; queries and keys normalised over all heads.",
        ),
    ]
