"""InternLM 2 (arXiv:2403.17297) and 3: Llama's shape under other names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fwk.interfaces.model import ModelContext
from fwk_layers import ColumnParallelLinear, Part, RMSNorm, RotaryEmbedding, RowParallelLinear, VocabEmbedding
from fwk_models._common.qkv import GroupedQKV, SplitQKV
from fwk_models._common.stack import Block, SelfAttention, Stack

if TYPE_CHECKING:
    from torch import Tensor

    from fwk_models._common.stack import Apply


@dataclass(frozen=True, slots=True)
class Names:
    """Of a layer's parts, and of what is around the layers."""

    embedding: str
    head: str
    norms: tuple[str, str]
    output: str
    mlp: tuple[str, str, str]


SECOND = Names(
    "model.tok_embeddings",
    "output",
    ("attention_norm", "ffn_norm"),
    "attention.wo",
    ("feed_forward.w1", "feed_forward.w3", "feed_forward.w2"),
)
THIRD = Names(
    "model.embed_tokens",
    "lm_head",
    ("input_layernorm", "post_attention_layernorm"),
    "self_attn.o_proj",
    ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)


class InternLM(Stack):
    """Token ids to hidden states to logits."""

    def __init__(self, context: ModelContext) -> None:
        config, raw = context.config, context.config.raw
        is_second = config.architecture == "InternLM2ForCausalLM"
        names, rotary = SECOND if is_second else THIRD, RotaryEmbedding(context)

        def norm(name: str) -> Apply:
            return RMSNorm(context, name, config.hidden_size, config.rms_norm_eps)

        def block(index: int) -> Block:
            prefix, bias = f"model.layers.{index}", bool(raw["input_bias"])
            if is_second:
                qkv = GroupedQKV(context, f"{prefix}.attention.wqkv", bias=bias)
            else:
                qkv = SplitQKV(context, f"{prefix}.self_attn", bias=bias)
            output = f"{prefix}.{names.output}"
            attention = SelfAttention(context, index, qkv, output, rotary=rotary, bias=bool(raw["output_bias"]))
            mlp = NamedMLP(context, [f"{prefix}.{name}" for name in names.mlp])
            before = (norm(f"{prefix}.{names.norms[0]}"), norm(f"{prefix}.{names.norms[1]}"))
            return Block(context, index, attention, mlp, before=before)

        self.build(
            context,
            embedding=VocabEmbedding(context, names.embedding),
            blocks=[block(index) for index in context.layers],
            norm=norm("model.norm"),
            rotaries=[rotary],
            head=names.head,
        )


class NamedMLP:
    """down(silu(gate(x)) * up(x)), of three layers by their names."""

    def __init__(self, context: ModelContext, names: list[str]) -> None:
        hidden, inner = context.config.hidden_size, context.config.intermediate_size
        self.operators = context.operators
        self.gate_up = ColumnParallelLinear(context, [Part(name, inner) for name in names[:2]], hidden)
        self.down = RowParallelLinear(context, names[2], inner, hidden)

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] to the same."""
        return self.down(self.operators.gate(self.gate_up(x), "silu"))
