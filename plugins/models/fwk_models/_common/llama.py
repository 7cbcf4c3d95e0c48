"""The decoder of the Llama family, as a transformer that reads top to bottom."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.interfaces.model import ModelContext
from fwk_layers import Attention, GatedMLP, QKVLinear, RotaryEmbedding, RotaryRows, RowParallelLinear
from fwk_models._common.decoder import Decoder, DecoderLayer

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch


class LlamaDecoder(Decoder):
    """The decoder as it is, with the attention below."""

    def make_layer(self, context: ModelContext, index: int) -> DecoderLayer:
        bias = bool(context.config.raw.get("mlp_bias", False))
        return DecoderLayer(
            context,
            index,
            lambda prefix: LlamaAttention(context, self.rotary, prefix, index),
            lambda prefix: GatedMLP(context, prefix, bias=bias),
            self.root,
        )


class LlamaAttention:
    """Grouped-query attention with rotary positions."""

    def __init__(self, context: ModelContext, rotary: RotaryEmbedding, prefix: str, index: int) -> None:
        config = context.config
        bias = bool(config.raw.get("attention_bias", False))
        # Qwen2 has one on q, k and v only, and no key says so.
        is_qwen2 = config.architecture == "Qwen2ForCausalLM" or config.raw.get("text_kind") == "qwen2"
        self.rotary = rotary
        self.qkv = self.only_reader = QKVLinear(
            context, prefix, bias=bias or is_qwen2
        )  # on q, k and v only, and no key says so
        self.output = RowParallelLinear(
            context,
            f"{prefix}.o_proj",
            config.num_heads * config.head_size,
            config.hidden_size,
            num_units=config.num_heads,
            bias=bias,
        )
        self.num_heads, self.num_kv_heads = self.qkv.num_heads, self.qkv.num_kv_heads
        self.head_size = config.head_size
        settings = {"sliding_window": config.window_of(index), "index": index}
        self.attention = Attention(context, self.num_heads, self.num_kv_heads, prefix=prefix, **settings)

    def __call__(self, x: Tensor, rows: RotaryRows, batch: ForwardBatch) -> Tensor:
        """[num_tokens, hidden_size] to the same, of the last layer the wanted tokens."""
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_size)
        return self.output(self.attention.turned(qkv, self.rotary, rows, batch))
