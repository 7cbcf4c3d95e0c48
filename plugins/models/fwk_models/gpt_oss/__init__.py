"""gpt-oss."""

from fwk import ModelSpec, hookimpl


@hookimpl
def models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="gpt_oss",
            load="fwk_models.gpt_oss.model:GptOss",
            architectures=("GptOssForCausalLM",),
            features=frozenset({"sinks"}),
            summary="Experts (MXFP4 or plain), attention with sinks, a window in every second layer.",
        )
    ]
