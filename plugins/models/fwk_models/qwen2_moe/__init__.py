"""Qwen1.5-MoE and Qwen2-MoE."""

from fwk import ModelSpec, hookimpl


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="qwen2_moe",
            load="fwk_models.qwen2_moe.model:Qwen2Moe",
            architectures=("Qwen2MoeForCausalLM",),
            summary="Qwen2's shape; routed experts, and a shared one whose part each token sets.",
        )
    ]
