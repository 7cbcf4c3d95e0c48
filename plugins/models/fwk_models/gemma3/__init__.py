"""Gemma 3, text only."""

from dataclasses import replace

from fwk import ModelSpec, hookimpl
from fwk.interfaces.model import AttentionNeeds
from fwk.types import ModelConfig


class Gemma3Spec(ModelSpec):
    """Asks for soft caps where the config has one."""

    def attention_needs(self, config: ModelConfig) -> AttentionNeeds:
        needs = super().attention_needs(config)
        if config.raw.get("attn_logit_softcapping") is None:
            return needs
        return replace(needs, features=needs.features | {"soft_cap"})


@hookimpl
def models() -> list[ModelSpec]:
    return [
        Gemma3Spec(
            name="gemma3",
            load="fwk_models.gemma3.model:Gemma3",
            architectures=("Gemma3ForCausalLM",),
            summary="Sliding-window and global layers in turn, each kind with its own rotary base.",
        )
    ]
