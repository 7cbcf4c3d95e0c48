"""GPT-2."""

from fwk import ModelSpec, hookimpl


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="gpt2",
            load="fwk_models.gpt2.model:GPT2",
            architectures=("GPT2LMHeadModel",),
            summary="Learned positions, layer norms, an MLP without gate.",
        ),
    ]
