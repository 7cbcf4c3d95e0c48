"""Granite, dense and with experts, and MiniCPM: Llama's shape with factors on its parts."""

from fwk import ModelSpec, hookimpl


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="granite",
            load="fwk_models.granite.model:Granite",
            architectures=(
                "GraniteForCausalLM",
                "GraniteMoeForCausalLM",
            ),
            summary="Llama's shape with factors on embedding, scores, stream and logits; the MLP may be experts.",
        ),
        ModelSpec(
            name="minicpm",
            load="fwk_models.granite.model:MiniCPM",
            architectures=("MiniCPMForCausalLM",),
            summary="Llama's shape with factors on embedding, stream and logits.",
        ),
    ]
