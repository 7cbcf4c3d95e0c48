"""OPT."""

from fwk import ModelSpec, hookimpl


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="opt",
            load="fwk_models.opt.model:OPT",
            architectures=("OPTForCausalLM",),
            summary="Learned positions, layer norms, an MLP without gate.",
        ),
    ]
