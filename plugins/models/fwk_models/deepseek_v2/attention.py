"""Multi-head latent attention in its absorbed form.

Keys and values of all heads are products of one small latent per token. Only the latent is cached, with the rotated
part of the key, which the heads share: the matrix that would make keys of latents multiplies the queries instead, and
the one that would make values multiplies what attention returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fwk.errors import ModelLoadError
from fwk.interfaces.attention import KVKind
from fwk_layers import (
    Attention,
    ColumnParallelLinear,
    HeadMatrices,
    Part,
    RMSNorm,
    RotaryEmbedding,
    RotaryRows,
    RowParallelLinear,
    yarn_temperature,
)

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext
    from fwk.types import ForwardBatch, ModelConfig

NORM_EPS = 1e-6  # of the norms inside attention, whatever the config says of the others
KEYS, VALUES = 0, 1


class LatentAttention:
    """Queries for each head, one latent for all."""

    def __init__(self, context: ModelContext, rotary: RotaryEmbedding, prefix: str, index: int) -> None:
        config, bias = context.config, bool(context.config.raw.get("attention_bias", False))
        hidden, heads = config.hidden_size, config.num_heads
        if config.sliding_window is not None:
            raise ModelLoadError(f"sliding_window {config.sliding_window}: latent attention has no sliding window")
        self.rank = config.integer("kv_lora_rank")
        self.rotated = config.integer("qk_rope_head_dim")
        self.unrotated = config.integer("qk_nope_head_dim")
        value_size = config.integer("v_head_dim")
        self.rotary = rotary
        self.query = QueryProjection(context, prefix, self.unrotated + self.rotated)
        self.latent = ColumnParallelLinear(
            context, [Part(f"{prefix}.kv_a_proj_with_mqa", self.rank + self.rotated, 1)], hidden, bias=bias
        )
        self.norm = RMSNorm(context, f"{prefix}.kv_a_layernorm", self.rank, NORM_EPS)
        self.of_heads = HeadMatrices(context, f"{prefix}.kv_b_proj", heads, (self.unrotated, value_size), self.rank)
        self.output = RowParallelLinear(
            context, f"{prefix}.o_proj", heads * value_size, hidden, num_units=heads, bias=bias
        )
        self.attention = Attention(
            context,
            self.of_heads.matrices[KEYS].shape[0],
            1,
            head_size=self.rank + self.rotated,
            scale=score_scale(config, self.unrotated + self.rotated),
            value_head_size=self.rank,
            kind=KVKind.LATENT,
            index=index,
        )

    def __call__(self, x: Tensor, rows: RotaryRows, batch: ForwardBatch) -> Tensor:
        """[num_tokens, hidden_size] to the same, of the last layer the wanted tokens."""
        q, q_rotated = self.query(x).split((self.unrotated, self.rotated), -1)
        q = torch.cat((self.of_heads.down(KEYS, q), self.rotary.rotate(q_rotated, rows)), -1)
        latent, k_rotated = self.latent(x).unsqueeze(1).split((self.rank, self.rotated), -1)
        k = torch.cat((self.norm(latent), self.rotary.rotate(k_rotated, rows)), -1)
        seen = self.attention(q, k, None, batch).unflatten(-1, (-1, self.rank))
        return self.output(self.of_heads.up(VALUES, seen).flatten(1))


class QueryProjection:
    """Hidden states to queries, through a latent of their own where the config has one."""

    def __init__(self, context: ModelContext, prefix: str, head_size: int) -> None:
        config = context.config
        out, heads, self.head_size = config.num_heads * head_size, config.num_heads, head_size
        self.first: ColumnParallelLinear | None = None
        if config.raw.get("q_lora_rank") is None:
            self.last = ColumnParallelLinear(context, [Part(f"{prefix}.q_proj", out, heads)], config.hidden_size)
            return
        rank, bias = config.integer("q_lora_rank"), bool(config.raw.get("attention_bias", False))
        self.first = ColumnParallelLinear(context, [Part(f"{prefix}.q_a_proj", rank, 1)], config.hidden_size, bias=bias)
        self.norm = RMSNorm(context, f"{prefix}.q_a_layernorm", rank, NORM_EPS)
        self.last = ColumnParallelLinear(context, [Part(f"{prefix}.q_b_proj", out, heads)], rank)

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] to [num_tokens, num_heads, head_size]."""
        x = x if self.first is None else self.norm(self.first(x))
        return self.last(x).view(x.shape[0], -1, self.head_size)


def score_scale(config: ModelConfig, head_size: int) -> float:
    """One over the root of the query's size; YaRN's temperature, where it is meant for all dimensions, is in here."""
    scale, settings = head_size**-0.5, config.rope.scaling
    if config.rope.kind != "default" and settings.get("mscale_all_dim"):
        scale *= yarn_temperature(float(settings["factor"]), float(settings["mscale_all_dim"])) ** 2
    return scale
