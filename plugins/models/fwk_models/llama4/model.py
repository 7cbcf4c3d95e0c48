"""Llama 4 (Meta 2025)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fwk.interfaces.model import ModelContext
from fwk_layers import Attention, GatedMLP, MoE, RMSNorm, RotaryEmbedding, Routing, RowParallelLinear, VocabEmbedding
from fwk_models._common.experts import SharedExperts
from fwk_models._common.qkv import SplitQKV
from fwk_models._common.stack import Block, Stack
from fwk_models._common.weights import StackedExperts

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch
    from fwk_models._common.stack import Apply, Rows


class Llama4(Stack):
    """Token ids to hidden states to logits. Of a model that also sees, the eyes are left out."""

    def __init__(self, context: ModelContext) -> None:
        config, raw = context.config, context.config.raw
        root = "language_model." if context.weights.has("language_model.model.embed_tokens.weight") else ""
        rotary = RotaryEmbedding(context, is_interleaved=True)

        def norm(name: str) -> Apply:
            return RMSNorm(context, f"{root}model.{name}", config.hidden_size, config.rms_norm_eps)

        def block(index: int) -> Block:
            prefix = f"{root}model.layers.{index}"
            turns = bool(raw["no_rope_layers"][index])  # 1 where there are positions, whatever its name says
            attention = Llama4Attention(context, index, f"{prefix}.self_attn", rotary, turns=turns)
            name = f"{prefix}.feed_forward"
            mlp: Apply
            if index in raw["moe_layers"]:
                mlp = SharedExperts(one_expert(context, name), GatedMLP(context, f"{name}.shared_expert"))
            else:
                mlp = GatedMLP(context, name, intermediate_size=config.integer("intermediate_size_mlp", 16384))
            names = f"layers.{index}.input_layernorm", f"layers.{index}.post_attention_layernorm"
            return Block(context, index, attention, mlp, before=(norm(names[0]), norm(names[1])))

        self.build(
            context,
            embedding=VocabEmbedding(context, f"{root}model.embed_tokens"),
            blocks=[block(index) for index in context.layers],
            norm=norm("norm"),
            rotaries=[rotary],
            head=f"{root}lm_head",
        )
        for name in context.weights.names():
            if name.startswith(("vision_model.", "multi_modal_projector.")):
                context.weights.skip(name)


class Llama4Attention:
    """Turned and then normalised queries and keys; in layers without positions, queries grow with theirs."""

    def __init__(self, context: ModelContext, index: int, prefix: str, rotary: RotaryEmbedding, *, turns: bool) -> None:
        config, raw = context.config, context.config.raw
        bias = bool(raw.get("attention_bias", False))
        self.qkv, self.rotary, self.turns = SplitQKV(context, prefix, bias=bias), rotary, turns
        self.norms, self.eps = turns and bool(raw.get("use_qk_norm", True)), config.rms_norm_eps
        self.grows = not turns and bool(raw.get("attn_temperature_tuning", True))
        self.floor, self.scale = float(raw.get("floor_scale", 8192)), float(raw.get("attn_scale", 0.1))
        size = config.num_heads * config.head_size
        self.output = RowParallelLinear(
            context, f"{prefix}.o_proj", size, config.hidden_size, num_units=config.num_heads, bias=bias
        )
        self.attention = Attention(context, self.qkv.num_heads, self.qkv.num_kv_heads, index=index, prefix=prefix)

    def __call__(self, x: Tensor, rows: Rows, batch: ForwardBatch) -> Tensor:
        """[num_tokens, hidden_size] to the same, of the last layer the wanted tokens."""
        q, k, v = self.qkv(x)
        if self.turns:
            q, k = (self.rotary.rotate(part, rows[self.rotary]) for part in (q, k))
        if self.norms:
            q, k = (self._normalised(part) for part in (q, k))
        if self.grows:
            steps = torch.floor((batch.positions.float() + 1.0) / self.floor)
            q = (q * (torch.log1p(steps) * self.scale + 1.0)[:, None, None]).to(q.dtype)
        return self.output(self.attention(q, k, v, batch))

    def _normalised(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()).to(x.dtype)


class ScaledInputMoE(MoE):
    """Each token's one expert gets its input times the sigmoid of its score."""

    def __call__(self, x: Tensor) -> Tensor:
        scores, ids = self.router(x).max(-1, keepdim=True)
        ones = torch.ones_like(scores, dtype=torch.float32)
        scaled = x * scores.float().sigmoid().to(x.dtype)
        return self.tp.all_reduce(self.runner.apply(scaled, ids, ones))


def one_expert(context: ModelContext, prefix: str) -> MoE:
    """The routed experts below ``prefix``: in two tensors, their matrices transposed, or one by one."""
    config, count = context.config, context.config.integer("num_local_experts", 16)
    names = f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj"
    if context.weights.has(names[0]):
        view = StackedExperts(context.weights, prefix, count, *names, is_transposed=True)
        context = replace(context, weights=view)
    return ScaledInputMoE(
        context,
        prefix,
        Routing(count, 1),
        intermediate_size=config.intermediate_size,
        router=f"{prefix}.router",
    )
