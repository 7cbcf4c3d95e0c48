"""Command R and its successors: attention and MLP side by side, norms without bias, scaled logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.interfaces.model import ModelContext
from fwk_layers import GatedMLP, LayerNorm, Part, RotaryEmbedding, VocabEmbedding
from fwk_layers.sharding import output_shard
from fwk_models._common.qkv import SplitQKV
from fwk_models._common.stack import Block, SelfAttention, Stack

if TYPE_CHECKING:
    from torch import Tensor


class Cohere(Stack):
    """Token ids to hidden states to logits. In Command R7B only layers with a window have positions."""

    def __init__(self, context: ModelContext) -> None:
        config, raw = context.config, context.config.raw
        rotary = RotaryEmbedding(context, is_interleaved=True)
        bias, eps = bool(raw.get("attention_bias", False)), float(raw.get("layer_norm_eps") or 1e-5)
        is_second = config.architecture == "Cohere2ForCausalLM"

        def block(index: int) -> Block:
            prefix, window = f"model.layers.{index}", config.window_of(index)
            attention = SelfAttention(
                context,
                index,
                SplitQKV(context, f"{prefix}.self_attn", bias=bias),
                f"{prefix}.self_attn.o_proj",
                rotary=None if is_second and window is None else rotary,
                norm=CohereNorm(context, f"{prefix}.self_attn", eps) if raw.get("use_qk_norm") else None,
                bias=bias,
                sliding_window=window,
            )
            norm = LayerNorm(context, f"{prefix}.input_layernorm", config.hidden_size, eps, bias=False)
            mlp = GatedMLP(context, f"{prefix}.mlp")
            return Block(context, index, attention, mlp, before=(norm, norm), is_parallel=True)

        self.build(
            context,
            embedding=VocabEmbedding(context, "model.embed_tokens"),
            blocks=[block(index) for index in context.layers],
            norm=LayerNorm(context, "model.norm", config.hidden_size, eps, bias=False),
            is_tied=bool(raw.get("tie_word_embeddings", True)),
            rotaries=[rotary],
            logit_scale=float(raw.get("logit_scale") or 0.0625),
        )


class CohereNorm:
    """``q_norm`` and ``k_norm``: a layer norm of each head, with weights of its own (Command R+)."""

    def __init__(self, context: ModelContext, prefix: str, eps: float) -> None:
        config = context.config
        self.eps, self.weights = eps, []
        for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
            full = f"{prefix}.{name}_norm.weight"
            whole = context.weights.tensor(full, (heads, config.head_size))
            mine = output_shard(Part(full, heads, heads), context.tp).cut(whole, 0, 1, full)
            self.weights.append(mine.to(context.device))

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """[num_tokens, heads, head_size] each, to the same."""
        return self._norm(q, self.weights[0]), self._norm(k, self.weights[1])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (weight.float() * wide).to(x.dtype)
