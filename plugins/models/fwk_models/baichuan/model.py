"""Baichuan 1 and 2 (arXiv:2309.10305)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch.nn.functional as F

from fwk.interfaces.model import ModelContext
from fwk_layers import GatedMLP, RMSNorm, RotaryEmbedding, VocabEmbedding
from fwk_models._common.alibi import slopes
from fwk_models._common.qkv import JoinedQKV
from fwk_models._common.stack import Block, SelfAttention, Stack
from fwk_models._common.weights import WeightView

if TYPE_CHECKING:
    from torch import Tensor

    from fwk_models._common.stack import Apply

SECOND_VOCABULARY = 125_696
"""Tokens of Baichuan 2, by which its head is told from that of the first."""


class Baichuan(Stack):
    """Token ids to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        config, raw = context.config, context.config.raw
        if config.vocab_size == SECOND_VOCABULARY:
            context = replace(context, weights=NormalisedHead(context.weights))
        has_slopes = bool(raw["has_slopes"])
        rotary = None if has_slopes else RotaryEmbedding(context)
        extras = slopes(context) if has_slopes else {}

        def norm(name: str) -> Apply:
            return RMSNorm(context, name, config.hidden_size, config.rms_norm_eps)

        def block(index: int) -> Block:
            prefix = f"model.layers.{index}"
            qkv, output = JoinedQKV(context, f"{prefix}.self_attn.W_pack"), f"{prefix}.self_attn.o_proj"
            attention = SelfAttention(context, index, qkv, output, rotary=rotary, extras=extras)
            before = (norm(f"{prefix}.input_layernorm"), norm(f"{prefix}.post_attention_layernorm"))
            return Block(context, index, attention, GatedMLP(context, f"{prefix}.mlp"), before=before)

        self.build(
            context,
            embedding=VocabEmbedding(context, "model.embed_tokens"),
            blocks=[block(index) for index in context.layers],
            norm=norm("model.norm"),
            rotaries=[] if rotary is None else [rotary],
        )


class NormalisedHead(WeightView):
    """Each row of the head has length one."""

    def seen(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        return F.normalize(self.source.tensor(name, shape).float()) if name == "lm_head.weight" else None
