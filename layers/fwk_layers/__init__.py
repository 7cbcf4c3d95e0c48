"""What model files are built from. Building a layer reads its weights; calling it computes.

Layers are plain objects made from a ``ModelContext``: they ask its quantisation method for the weight format, shard
by its tensor-parallel group, and hand attention to its backend, so a model file contains none of the three. A layer
that one model family alone needs belongs to that family's plugin.
"""

from fwk.interfaces.state import RecurrentState
from fwk_layers.activation import activation, gated
from fwk_layers.attention import Attention
from fwk_layers.border import Border
from fwk_layers.cross_attention import CrossAttention, EncoderDecoderStep
from fwk_layers.embedding import LMHead, VocabEmbedding
from fwk_layers.encoder import EncoderAttention
from fwk_layers.heads import HeadMatrices
from fwk_layers.hidden_tap import HiddenTap
from fwk_layers.insert import insert
from fwk_layers.linear import ColumnParallelLinear, QKVLinear, ReplicatedLinear, RowParallelLinear
from fwk_layers.mlp import GatedMLP
from fwk_layers.moe import MoE, Routing
from fwk_layers.norm import LayerNorm, OffsetRMSNorm, QKNorm, RMSNorm
from fwk_layers.rope import RotaryEmbedding, RotaryRows, yarn_temperature
from fwk_layers.select_tokens import SelectTokens
from fwk_layers.sharding import Part, rank_rows

__all__ = [
    "Attention",
    "Border",
    "ColumnParallelLinear",
    "CrossAttention",
    "EncoderAttention",
    "EncoderDecoderStep",
    "GatedMLP",
    "HeadMatrices",
    "HiddenTap",
    "LMHead",
    "LayerNorm",
    "MoE",
    "OffsetRMSNorm",
    "Part",
    "QKNorm",
    "QKVLinear",
    "RMSNorm",
    "RecurrentState",
    "ReplicatedLinear",
    "RotaryEmbedding",
    "RotaryRows",
    "Routing",
    "RowParallelLinear",
    "SelectTokens",
    "VocabEmbedding",
    "activation",
    "gated",
    "insert",
    "rank_rows",
    "yarn_temperature",
]
