"""Qwen3, dense and with experts."""

from fwk import ModelSpec, hookimpl


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="qwen3",
            load="fwk_models.qwen3.model:Qwen3",
            architectures=("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
            summary="Llama's shape with normalised queries and keys; the MLP may be a mixture of experts.",
        )
    ]
