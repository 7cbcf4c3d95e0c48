"""Gather the past of each sequence, and say which key a query sees and how a score is bent: torch makes the kernel."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from fwk.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer, BlockFormat, KVSpec
from fwk_attention._common.rows import block_format, move_rows, rows_of

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers alike in this share masks."""

    kv_group: int
    sliding_window: int | None
    chunk_size: int | None

    @staticmethod
    def of(layer: AttentionLayer) -> LayerKind:
        chunk = layer.extras.get("chunk_size")
        return LayerKind(layer.kv_group, layer.sliding_window, None if chunk is None else int(chunk))

    def first_seen(self, places: Any) -> Any:
        """The first place that tokens at ``places``, numpy, see of what came before them."""
        first = np.zeros_like(places)
        if self.sliding_window is not None:
            first = np.maximum(places - self.sliding_window + 1, first)
        if self.chunk_size is not None:
            first = np.maximum(places // self.chunk_size * self.chunk_size, first)
        return first


@dataclass(frozen=True, slots=True)
class Part:
    """Sequences with as many new tokens each, and the blocks that these see."""

    tokens: slice
    num_seqs: int
    blocks: Tensor  # [num_seqs, num_blocks] int64; padding names a block of the sequence itself
    queries: Tensor  # [num_seqs] int64: place of the first new token in its sequence
    keys: Tensor  # [num_seqs] int64: place of the first token of ``blocks``
    mask: BlockMask


@dataclass(frozen=True, slots=True)
class KindPlan:
    """Where a group's new tokens go, and the parts of the step."""

    blocks: Tensor  # [num_tokens] int64
    offsets: Tensor  # [num_tokens] int64
    fresh: Tensor | None  # blocks whose first slot is among them
    parts: list[Part]


class FlexBackend(AttentionBackend):
    """Paged attention by FlexAttention."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self._rows = rows_of(context)
        self._attend: Callable[..., Any] = flex_attention
        if context.device.type != "cpu":
            self._attend = torch.compile(flex_attention, dynamic=True)

    def block_format(self, spec: KVSpec) -> BlockFormat:
        return block_format(spec, self.context.block_size, self._rows)

    def plan(self, batch: ForwardBatch, layers: list[AttentionLayer]) -> dict[LayerKind, KindPlan]:
        plans: dict[LayerKind, KindPlan] = {}
        for layer in layers:
            if layer.state is None:
                layer.state = LayerKind.of(layer)
            if layer.state not in plans:
                plans[layer.state] = self._plan(layer.state, batch)
        return plans

    def _plan(self, kind: LayerKind, batch: ForwardBatch) -> KindPlan:
        group, size = batch.kv_groups[kind.kv_group], self.context.block_size
        blocks, offsets = np.divmod(group.slot_mapping_np.astype(np.int64), size)
        fresh = blocks[offsets == 0]
        starts = batch.query_start_np.astype(np.int64)
        is_longer = np.diff(starts) != 1
        decodes = int(is_longer.argmax()) if is_longer.any() else batch.num_seqs
        cuts = [(0, decodes)] if decodes else []
        cuts += [(i, i + 1) for i in range(decodes, batch.num_seqs)]
        parts = [self._part(kind, batch, starts, first, last) for first, last in cuts]
        return KindPlan(self._send(blocks), self._send(offsets), self._send(fresh) if len(fresh) else None, parts)

    def _part(self, kind: LayerKind, batch: ForwardBatch, starts: Any, first: int, last: int) -> Part:
        size = self.context.block_size
        lens = batch.seq_lens_np[first:last].astype(np.int64)
        num_new = int(starts[first + 1] - starts[first])
        pasts = lens - num_new
        begin = kind.first_seen(pasts) // size
        counts = -(-lens // size) - begin
        columns = np.arange(int(counts.max()))
        columns = begin[:, None] + np.where(columns < counts[:, None], columns, 0)
        table = batch.kv_groups[kind.kv_group].block_table_np[first:last].astype(np.int64)
        queries, keys = self._send(pasts), self._send(begin * size)

        def sees(seq: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            at, of = queries[seq] + query, keys[seq] + key
            seen = of <= at
            if kind.sliding_window is not None:
                seen = seen & (of > at - kind.sliding_window)
            if kind.chunk_size is not None:
                seen = seen & (of // kind.chunk_size == at // kind.chunk_size)
            return seen

        mask = create_block_mask(
            sees, last - first, None, num_new, columns.shape[1] * size, device=str(self.context.device)
        )
        return Part(
            slice(int(starts[first]), int(starts[last])),
            last - first,
            self._send(table[np.arange(last - first)[:, None], columns]),
            queries,
            keys,
            mask,
        )

    def _send(self, x: Any) -> Tensor:
        return self.context.send(np.ascontiguousarray(x))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        extra: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        plan: KindPlan = batch.plan[layer.state]
        cache = layer.kv_cache
        assert cache is not None, "forward before the KV cache was allocated"
        assert v is not None, "latent layers are not served"
        if plan.fresh is not None:
            # What an earlier owner left in a block may be NaN, and is read, if only to be masked.
            cache.view(torch.uint8).index_fill_(0, plan.fresh, 0)
        for place, x in enumerate((k, v)):
            cache[plan.blocks, place, :, plan.offsets] = self._rows.encode(x)
        out = torch.empty_like(q)
        for part in plan.parts:
            found = cache[part.blocks]  # [num_seqs, num_blocks, 2, num_kv_heads, block_size, row_size]
            keys, values = (
                self._rows.decode(found[:, :, i].transpose(1, 2).flatten(2, 3).contiguous(), layer.head_size)
                for i in range(2)
            )
            queries = q[part.tokens].unflatten(0, (part.num_seqs, -1)).transpose(1, 2)
            attended = self._run(queries, keys, values, layer, part)
            out[part.tokens] = attended.transpose(1, 2).flatten(0, 1)
        return out

    def _run(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, part: Part) -> Tensor:
        """q: [num_seqs, num_heads, num_new, head_size]; k, v: [num_seqs, num_kv_heads, num_keys, head_size]."""
        bent = _score(layer, part)
        grouped = layer.num_heads != layer.num_kv_heads
        with warnings.catch_warnings():
            # On a CPU it is unfused on purpose: what the compiler would make is made anew for each shape.
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            return self._attend(q, k, v, score_mod=bent, block_mask=part.mask, scale=layer.scale, enable_gqa=grouped)

    def move(self, layers: list[AttentionLayer], source: Tensor, target: Tensor) -> None:
        move_rows(layers, source, target)


def _score(layer: AttentionLayer, part: Part) -> Callable[..., Tensor] | None:
    """How a layer's scores are bent and biased; None where they are left alone."""
    cap, slopes = layer.soft_cap, layer.extras.get("alibi_slopes")
    if cap is None and slopes is None:
        return None

    def bent(score: Tensor, seq: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if slopes is not None:
            distance = part.keys[seq] + key - part.queries[seq] - query
            score = score + slopes[head] * distance
        return score

    return bent
