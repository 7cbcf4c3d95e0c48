"""Decoders with experts: how many there are, how tokens choose, and the parts that all tokens pass."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fwk.errors import ModelLoadError
from fwk.interfaces.model import ModelContext
from fwk_layers import GatedMLP, MoE, ReplicatedLinear, RMSNorm, RotaryEmbedding, Routing, VocabEmbedding
from fwk_models._common.qkv import SplitQKV
from fwk_models._common.recurrent_cpu import RecurrentKernels
from fwk_models._common.stack import Block, SelfAttention, Stack
from fwk_models._common.weights import StackedExperts

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ModelConfig
    from fwk_models._common.stack import Apply


class ExpertStack(Stack):
    """Llama's shape; a model says what its attention and its feed-forward networks are."""

    def __init__(self, context: ModelContext) -> None:
        config = context.config
        rotary = RotaryEmbedding(context)

        self.build(
            context,
            embedding=VocabEmbedding(context, "model.embed_tokens"),
            blocks=[self.block(context, index, rotary) for index in context.layers],
            norm=RMSNorm(context, "model.norm", config.hidden_size, config.rms_norm_eps),
            rotaries=[rotary],
        )

    def block(self, context: ModelContext, index: int, rotary: RotaryEmbedding) -> Block:
        """Layer ``index``."""
        config, prefix = context.config, f"model.layers.{index}"

        def norm(name: str) -> Apply:
            return RMSNorm(context, f"{prefix}.{name}", config.hidden_size, config.rms_norm_eps)

        attention = self.attention(context, index, f"{prefix}.self_attn", rotary)
        before = (norm("input_layernorm"), norm("post_attention_layernorm"))
        return Block(context, index, attention, self.mlp(context, index, prefix), before=before)

    def attention(self, context: ModelContext, index: int, prefix: str, rotary: RotaryEmbedding) -> SelfAttention:
        """The attention below ``prefix``."""
        bias, window = bool(context.config.raw.get("attention_bias", False)), context.config.window_of(index)
        qkv = SplitQKV(context, prefix, bias=bias)
        return SelfAttention(context, index, qkv, f"{prefix}.o_proj", rotary=rotary, bias=bias, sliding_window=window)

    def mlp(self, context: ModelContext, index: int, prefix: str) -> Apply:
        """The feed-forward network of the layer at ``prefix``."""
        raise NotImplementedError


class SharedExperts:
    """Routed experts, and others that every token passes through.

    gate: to one number, whose sigmoid is a factor on what the shared ones return. None: the factor is one.
    """

    def __init__(
        self,
        routed: MoE,
        shared: GatedMLP,
        gate: ReplicatedLinear | None = None,
        kernels: RecurrentKernels | None = None,
    ) -> None:
        """kernels: that apply the gate; None: torch does."""
        self.routed, self.shared, self.gate, self._kernels = routed, shared, gate, kernels

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] to the same."""
        shared = self.shared(x)
        if self.gate is not None and self._kernels is not None:
            return self._kernels.add_gated(self.routed(x), shared, self.gate(x))
        if self.gate is not None:
            shared = torch.sigmoid(self.gate(x)) * shared
        return self.routed(x).add_(shared)


def gated_shared_experts(context: ModelContext, prefix: str, *, normalises: bool) -> SharedExperts:
    """Qwen's: routed experts, and a shared one whose part each token sets (``shared_expert_gate``)."""
    config = context.config
    routing = Routing(num_experts(config), config.integer("num_experts_per_tok"), normalises=normalises)
    routed = MoE(context, prefix, routing, intermediate_size=config.integer("moe_intermediate_size"))
    inner = config.integer("shared_expert_intermediate_size")
    shared = GatedMLP(context, f"{prefix}.shared_expert", intermediate_size=inner)
    plain = replace(context, lora=None)
    gate = ReplicatedLinear(plain, f"{prefix}.shared_expert_gate", config.hidden_size, 1, method=context.plain)
    return SharedExperts(routed, shared, gate, RecurrentKernels.of(context))


def granite_experts(context: ModelContext, prefix: str) -> MoE:
    """Experts in two tensors, or one by one; the weights of a token's are a softmax over their scores alone."""
    config = context.config
    count = config.integer("num_local_experts")
    names = f"{prefix}.input_linear.weight", f"{prefix}.output_linear.weight"
    if context.weights.has(names[0]):
        context = replace(context, weights=StackedExperts(context.weights, prefix, count, *names))
    routing = Routing(count, config.integer("num_experts_per_tok"), normalises=True)
    router = f"{prefix}.router.layer"
    return MoE(context, prefix, routing, intermediate_size=config.intermediate_size, router=router)


def num_experts(config: ModelConfig) -> int:
    """By the name the config has for it: transformers 5 writes another than earlier versions."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return config.integer(next((name for name in names if name in config.raw), names[0]))


def is_sparse(config: ModelConfig, index: int) -> bool:
    """Whether the layer has experts, by Qwen's keys."""
    every = int(config.raw.get("decoder_sparse_step") or 1)
    return index not in (config.raw.get("mlp_only_layers") or ()) and (index + 1) % every == 0


def corrected_routing(config: ModelConfig) -> Routing:
    """DeepSeek-V3's (arXiv:2412.19437): sigmoids, of the best groups, chosen with a bias that does not weigh."""
    raw = config.raw
    return Routing(
        num_experts(config),
        config.integer("num_experts_per_tok"),
        normalises=bool(raw.get("norm_topk_prob", True)),
        scale=float(raw.get("routed_scaling_factor", 1.0)),
        num_groups=config.integer("n_group", 1),
        top_groups=config.integer("topk_group", 1),
        in_float32=True,
        is_sigmoid=True,
        has_correction=True,
    )


def corrected_experts(context: ModelContext, prefix: str) -> SharedExperts:
    """Experts by ``corrected_routing`` and the shared ones alongside them."""
    config, raw = context.config, context.config.raw
    method, scores = raw.get("topk_method", "noaux_tc"), raw.get("scoring_func", "sigmoid")
    if (method, scores) != ("noaux_tc", "sigmoid") or raw.get("moe_layer_freq", 1) != 1:
        raise ModelLoadError(
            f"{prefix}: routing by {method!r} and {scores!r} in every {raw.get('moe_layer_freq', 1)}. layer is not "
            "known; this model routes by 'noaux_tc' and 'sigmoid' in every layer"
        )
    inner = config.integer("moe_intermediate_size")
    shared = GatedMLP(
        context,
        f"{prefix}.shared_experts",
        intermediate_size=inner * config.integer("n_shared_experts"),
        bias=bool(raw.get("mlp_bias", False)),
    )
    return SharedExperts(MoE(context, prefix, corrected_routing(config), intermediate_size=inner), shared)


def skip_predictors(context: ModelContext) -> None:
    """Leave out the layers behind the last one: they predict further tokens, for speculation."""
    last = context.config.num_layers
    for name in context.weights.names():
        number = name.removeprefix("model.layers.").partition(".")[0]
        if name.startswith("model.layers.") and number.isdigit() and int(number) >= last:
            context.weights.skip(name)
