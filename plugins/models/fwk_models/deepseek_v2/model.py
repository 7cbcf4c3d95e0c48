"""DeepSeek-V2 (arXiv:2405.04434)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.errors import ModelLoadError
from fwk.interfaces.model import Model, ModelContext
from fwk.layers import GatedMLP, LMHead, MoE, RMSNorm, RotaryEmbedding, RotaryRows, Routing, VocabEmbedding
from fwk_models.deepseek_v2.attention import LatentAttention

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch


class DeepseekV2(Model):
    """Token ids to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        config = context.config
        self.embedding = VocabEmbedding(context, "model.embed_tokens")
        self.rotary = RotaryEmbedding(context, config.integer("qk_rope_head_dim"), is_interleaved=True)
        self.layers = [DeepseekV2Layer(context, self.rotary, index) for index in range(config.num_layers)]
        self.norm = RMSNorm(context, "model.norm", config.hidden_size, config.rms_norm_eps)
        self.head = LMHead(context, "lm_head", self.embedding if config.tie_word_embeddings else None)

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.embedding(batch.token_ids)
        rows = self.rotary.rows(batch.positions)
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual, rows, batch)
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


class DeepseekV2Layer:
    """Attention and MLP or experts, each on the normalised residual stream."""

    def __init__(self, context: ModelContext, rotary: RotaryEmbedding, index: int) -> None:
        config, prefix = context.config, f"model.layers.{index}"
        self.input_norm = RMSNorm(context, f"{prefix}.input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.attention = LatentAttention(context, rotary, f"{prefix}.self_attn")
        self.mlp_norm = RMSNorm(context, f"{prefix}.post_attention_layernorm", config.hidden_size, config.rms_norm_eps)
        is_dense = index < config.integer("first_k_dense_replace", 0, low=0)
        self.mlp = (
            GatedMLP(context, f"{prefix}.mlp", bias=bool(config.raw.get("mlp_bias", False)))
            if is_dense
            else Experts(context, f"{prefix}.mlp")
        )

    def __call__(
        self, x: Tensor, residual: Tensor | None, rows: RotaryRows, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """x and the residual stream it is still to be added to: [num_tokens, hidden_size] each."""
        x, residual = self.input_norm.add(x, residual)
        x = self.attention(x, rows, batch)
        x, residual = self.mlp_norm.add(x, residual)
        return self.mlp(x), residual


class Experts:
    """Routed experts, and shared ones that every token passes through."""

    def __init__(self, context: ModelContext, prefix: str) -> None:
        config, raw = context.config, context.config.raw
        method = raw.get("topk_method") or "greedy"
        if method not in ("greedy", "group_limited_greedy") or raw.get("scoring_func", "softmax") != "softmax":
            raise ModelLoadError(
                f"{prefix}: routing by {method!r} and {raw.get('scoring_func', 'softmax')!r} is not known; "
                "DeepSeek-V2 routes greedily by softmax"
            )
        if raw.get("norm_topk_prob") or raw.get("moe_layer_freq", 1) != 1:
            raise ModelLoadError(f"{prefix}: 'norm_topk_prob' and 'moe_layer_freq' are not known for DeepSeek-V2")
        inner = config.integer("moe_intermediate_size")
        is_grouped = method == "group_limited_greedy"
        routing = Routing(
            config.integer("n_routed_experts"),
            config.integer("num_experts_per_tok"),
            scale=float(raw.get("routed_scaling_factor", 1.0)),
            num_groups=config.integer("n_group") if is_grouped else 1,
            top_groups=config.integer("topk_group") if is_grouped else 1,
            in_float32=True,
        )
        self.routed = MoE(context, prefix, routing, intermediate_size=inner)
        self.shared = GatedMLP(
            context,
            f"{prefix}.shared_experts",
            intermediate_size=inner * config.integer("n_shared_experts"),
            bias=bool(raw.get("mlp_bias", False)),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] to the same."""
        return self.routed(x).add_(self.shared(x))
