"""The Llama family: Llama, Mistral, Qwen2 and whatever shares their shape."""

from fwk import ModelSpec, hookimpl


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="llama",
            load="fwk_models.llama.model:Llama",
            architectures=("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"),
            summary="Decoder with RMSNorm, rotary positions, grouped-query attention and a gated MLP.",
        )
    ]
