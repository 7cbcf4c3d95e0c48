"""BLOOM."""

from fwk import ModelSpec, hookimpl


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="bloom",
            load="fwk_models.bloom.model:Bloom",
            architectures=("BloomForCausalLM",),
            features=frozenset({"alibi_slopes"}),
            summary="Slopes instead of positions, layer norms, an MLP without gate.",
        ),
    ]
