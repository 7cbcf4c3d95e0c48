"""The decoder of the language model within one that also sees or hears, by its own kind."""

from __future__ import annotations

from fwk.interfaces.model import ModelContext
from fwk_layers import GatedMLP
from fwk_models._common.attention import NormedAttention
from fwk_models._common.decoder import DecoderLayer
from fwk_models._common.llama import LlamaDecoder


class NestedDecoder(LlamaDecoder):
    """The decoder of ``text_kind``, below the names of either generation of checkpoints."""

    def __init__(self, context: ModelContext) -> None:
        is_old = context.weights.has("language_model.model.embed_tokens.weight")
        self.root = "language_model.model" if is_old else "model.language_model"
        self.head_name = "language_model.lm_head" if is_old else "lm_head"
        self.outer = "" if is_old else "model."
        super().__init__(context)

    def make_layer(self, context: ModelContext, index: int) -> DecoderLayer:
        raw = context.config.raw
        if raw["text_kind"] != "qwen3":
            return super().make_layer(context, index)
        bias = bool(raw.get("attention_bias", False))
        return DecoderLayer(
            context,
            index,
            lambda prefix: NormedAttention(context, self.rotary, prefix, index, bias=bias),
            lambda prefix: GatedMLP(context, prefix),
            self.root,
        )

    def skip(self, context: ModelContext, *roots: str) -> None:
        """Leave out what a run of text alone does not need."""
        for name in context.weights.names():
            if name.startswith(tuple(self.outer + root for root in roots)):
                context.weights.skip(name)
