"""StarCoder2."""

from fwk import ModelSpec, hookimpl


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="starcoder2",
            load="fwk_models.starcoder2.model:Starcoder2",
            architectures=("Starcoder2ForCausalLM",),
            summary="Rotary positions, layer norms, an MLP without gate, a window.",
        ),
    ]
