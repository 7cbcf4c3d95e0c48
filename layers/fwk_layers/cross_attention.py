"""A step of a model with an encoder and a decoder: whose tokens are whose, and attention of the second to the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fwk.interfaces.attention import AttentionLayer
from fwk.types.batch import KVGroup

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext
    from fwk.types import ForwardBatch
    from fwk_layers.attention import Attention

FEATURE = "cross_attention"


class CrossAttention:
    """A decoder's attention to what an encoder made of the prompt, whose K and V are written once.

    They are in the cache of ``own``, the self-attention of the same layer, at the places of the prompt.
    """

    def __init__(self, context: ModelContext, own: Attention, *, scale: float | None = None, prefix: str = "") -> None:
        self.backend, self.own = context.attention, own.layer
        self.layer = AttentionLayer(
            index=own.layer.index,
            num_heads=own.layer.num_heads,
            num_kv_heads=own.layer.num_kv_heads,
            head_size=own.layer.head_size,
            scale=own.layer.head_size**-0.5 if scale is None else scale,
            needs=frozenset({FEATURE}),
            prefix=prefix,
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> Tensor:
        """q: [num_tokens, num_heads, head_size]; k, v: [num_encoded, num_kv_heads, head_size], of prompts that start.

        batch: ``EncoderDecoderStep.cross``. Returns [num_tokens, num_heads * head_size].
        """
        self.layer.kv_cache = self.own.kv_cache
        return self.backend.forward(q, k, v, self.layer, batch).reshape(q.shape[0], -1)


@dataclass(frozen=True, slots=True)
class EncoderDecoderStep:
    """The parts of a step.

    encoder: the prompts that start in it, [num_encoded] tokens; None where none does. decoder: the others' tokens, as
    a batch whose sequences begin with the decoder's first token. cross: the same queries, with the prompts as the past.
    """

    encoder: ForwardBatch | None
    decoder: ForwardBatch
    cross: ForwardBatch
    decoder_tokens: Tensor | None  # [num_decoded] int64: the decoder's tokens in the step; None: all are
    num_tokens: int

    @staticmethod
    def of(batch: ForwardBatch, context: ModelContext, cross: Sequence[CrossAttention]) -> EncoderDecoderStep:
        """The parts of ``batch``, with attention planned for the model's layers, of which ``cross`` is one each."""
        size, where = context.attention.context.block_size, batch.token_ids.device
        encoded = batch.encoder_lens_np.astype(np.int64)
        first = -(-encoded // size) * size  # place of the decoder's first token
        starts, seq_lens = batch.query_start_np.astype(np.int64), batch.seq_lens_np.astype(np.int64)
        num_new = np.diff(starts)
        rows = np.repeat(np.arange(len(num_new)), num_new)
        places = np.arange(starts[-1]) - np.repeat(starts[1:] - seq_lens, num_new)
        is_encoded, is_decoded = places < encoded[rows], places >= first[rows]
        slots, table = batch.kv_groups[0].slot_mapping_np, batch.kv_groups[0].block_table_np

        def part(chosen: Any, query_start: Any, lens: Any, blocks: Any, stored: Any, positions: Any) -> ForwardBatch:
            """A batch of the tokens ``chosen``; all numpy."""
            wide, kept = np.ascontiguousarray(blocks, np.int32), np.ascontiguousarray(stored, np.int64)
            begin, ends = query_start.astype(np.int32), lens.astype(np.int32)
            tokens = batch.token_ids if len(chosen) == len(places) else batch.token_ids[_to(chosen, where)]
            return replace(
                batch,
                token_ids=tokens,
                positions=_to(positions, where),
                query_start=_to(begin, where),
                query_start_np=begin,
                seq_lens=_to(ends, where),
                seq_lens_np=ends,
                kv_groups=[KVGroup(_to(kept, where), _to(wide, where), kept, wide)],
                is_decode=len(chosen) == len(lens),
                hidden_indices=None,
            )

        encoder = None
        if is_encoded.any():
            chosen = np.flatnonzero(is_encoded)
            starting = np.flatnonzero(np.bincount(rows[chosen], minlength=len(num_new)))
            begins = np.concatenate(([0], np.cumsum(encoded[starting])))
            encoder = part(chosen, begins, encoded[starting], table[starting], slots[chosen], places[chosen])
        chosen = np.flatnonzero(is_decoded)
        begins = np.concatenate(([0], np.cumsum(np.bincount(rows[chosen], minlength=len(num_new)))))
        own = seq_lens - first
        columns = (first // size)[:, None] + np.arange(-(-int(own.max()) // size))
        shifted = np.take_along_axis(table, np.minimum(columns, table.shape[1] - 1), 1)
        decoder = part(chosen, begins, own, shifted, slots[chosen], places[chosen] - first[rows[chosen]])
        past = np.maximum(encoded, 1)  # a step that warms up has no prompt
        others = table[:, : -(-int(past.max()) // size)]
        crossing = part(chosen, begins, past, others, slots[is_encoded], places[chosen] - first[rows[chosen]])
        decoder.plan = context.attention.plan(decoder, context.attention_layers)
        crossing.plan = context.attention.plan(crossing, [attention.layer for attention in cross])
        is_all = len(chosen) == len(places)
        return EncoderDecoderStep(encoder, decoder, crossing, None if is_all else _to(chosen, where), len(places))

    def joined(self, decoded: Tensor) -> Tensor:
        """[num_decoded, hidden_size] at their tokens of the step, [num_tokens, hidden_size]: zeros for the others."""
        if self.decoder_tokens is None:
            return decoded
        out = decoded.new_zeros(self.num_tokens, decoded.shape[1])
        return out.index_copy_(0, self.decoder_tokens, decoded)


def _to(x: Any, where: torch.device) -> Tensor:
    return torch.from_numpy(x).to(where)
