"""Double sparsity in plain torch.

A layer's cache is [num_blocks, 2, num_kv_heads, block_size, head_size]. A key's channels stand in the order of their
weight: queries have the same order, so that products stay what they are, and a key's heavy channels are the beginning
of its row. Nothing is stored beyond K and V.

Of a long text, one token's query is multiplied with the heavy channels of all keys, each head takes the tokens that
have the largest products, and attends to these alone, exactly. Everything else is computed in full: prompts, sequences
up to the threshold, and layers with a sliding window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from fwk.errors import ConfigError
from fwk.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer, BlockFormat, KVSpec
from fwk_attention._common.rows import block_format, move_rows, rows_of
from fwk_attention.double_sparsity.channels import Channels

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch

QUERIES = 512
"""Of a prompt at a time, so that the mask stays small."""


@dataclass(frozen=True, slots=True)
class LayerState:
    """What a layer of this backend knows of itself."""

    kind: tuple[int, int | None]  # KV group and sliding window: layers alike in these share a plan
    keys: Tensor  # [num_kv_heads, head_size] int64: the channels in their order
    queries: Tensor  # [num_heads, head_size] int64


@dataclass(frozen=True, slots=True)
class Decode:
    """Sequences with one new token each, either all attended to in full or none."""

    tokens: Tensor  # [n] int64
    blocks: Tensor  # [n, num_blocks] int64; padding names a block of the sequence itself
    mask: Tensor  # [n, num_blocks * block_size] bool: the keys that are seen
    is_sparse: bool


@dataclass(frozen=True, slots=True)
class Prompt:
    """One sequence's several new tokens."""

    tokens: slice
    blocks: Tensor  # [num_blocks] int64: those that the new tokens see
    past: int
    begin: int  # the first token of ``blocks``


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a group's new tokens go, and the parts of the step."""

    blocks: Tensor  # [num_tokens] int64
    offsets: Tensor  # [num_tokens] int64
    fresh: Tensor  # blocks whose first slot is among them
    decodes: list[Decode]
    prompts: list[Prompt]


class DoubleSparsityBackend(AttentionBackend):
    """Attention over the heaviest tokens, found by their heaviest channels."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        options = context.options
        self._channels = Channels(
            options.ds_channel_config_path, options.ds_heavy_channel_type, context.tp_rank, context.tp_size
        )
        self._rows = rows_of(context)
        self._num_channels = int(options.ds_heavy_channel_num)
        self._num_tokens = int(options.ds_heavy_token_num)
        self._threshold = int(options.ds_sparse_decode_threshold)

    def block_format(self, spec: KVSpec) -> BlockFormat:
        if self._num_channels > spec.head_size:
            raise ConfigError(
                f"--ds-heavy-channel-num {self._num_channels}: this model's heads have {spec.head_size} channels"
            )
        return block_format(spec, self.context.block_size, self._rows)

    def plan(self, batch: ForwardBatch, layers: list[AttentionLayer]) -> dict[tuple[int, int | None], Plan]:
        plans: dict[tuple[int, int | None], Plan] = {}
        for layer in layers:
            if layer.state is None:
                order = self._channels.order(layer).to(self.context.device)
                spread = order.repeat_interleave(layer.num_heads // layer.num_kv_heads, 0)
                layer.state = LayerState((layer.kv_group, layer.sliding_window), order, spread)
            if layer.state.kind not in plans:
                plans[layer.state.kind] = self._plan(batch, *layer.state.kind)
        return plans

    def _plan(self, batch: ForwardBatch, kv_group: int, window: int | None) -> Plan:
        group = batch.kv_groups[kv_group]
        blocks, offsets = np.divmod(group.slot_mapping_np.astype(np.int64), self.context.block_size)
        starts, lens = batch.query_start_np.astype(np.int64), batch.seq_lens_np.astype(np.int64)
        table, num_new = group.block_table_np.astype(np.int64), np.diff(starts)
        is_sparse = (num_new == 1) & (lens > self._threshold) & (window is None)
        decodes = [
            self._decode(starts[chosen], table[chosen], lens[chosen], window, sparse)
            for sparse in (False, True)
            if len(chosen := np.flatnonzero((num_new == 1) & (is_sparse == sparse)))
        ]
        prompts = [
            self._prompt_of(int(starts[i]), int(starts[i + 1]), int(lens[i]), table[i], window)
            for i in np.flatnonzero(num_new > 1)
        ]
        return Plan(self._send(blocks), self._send(offsets), self._send(blocks[offsets == 0]), decodes, prompts)

    def _prompt_of(self, start: int, stop: int, length: int, table: Any, window: int | None) -> Prompt:
        size, past = self.context.block_size, length - (stop - start)
        begin = 0 if window is None else max(past - window + 1, 0) // size
        return Prompt(slice(start, stop), self._send(table[begin : -(-length // size)]), past, begin * size)

    def _decode(self, tokens: Any, table: Any, lens: Any, window: int | None, is_sparse: bool) -> Decode:
        size = self.context.block_size
        first = np.zeros_like(lens) if window is None else np.maximum(lens - window, 0)
        begin, counts = first // size, -(-lens // size) - first // size
        columns = np.arange(int(counts.max()))
        columns = begin[:, None] + np.where(columns < counts[:, None], columns, 0)
        places = begin[:, None] * size + np.arange(columns.shape[1] * size)
        mask = (places >= first[:, None]) & (places < lens[:, None])
        blocks = table[np.arange(len(lens))[:, None], columns]
        return Decode(self._send(tokens), self._send(blocks), self._send(mask), is_sparse)

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
        state: LayerState = layer.state
        plan: Plan = batch.plan[state.kind]
        cache = layer.kv_cache
        assert cache is not None, "forward before the KV cache was allocated"
        assert v is not None, "latent layers are not served"
        # What an earlier owner left in a block may be NaN, and is read, if only to be masked.
        cache.view(torch.uint8).index_fill_(0, plan.fresh, 0)
        cache[plan.blocks, 0, :, plan.offsets] = self._rows.encode(k.gather(2, state.keys.expand(k.shape)))
        cache[plan.blocks, 1, :, plan.offsets] = self._rows.encode(v)
        q = q.gather(2, state.queries.expand(q.shape))
        out = torch.empty_like(q)
        for prompt in plan.prompts:
            out[prompt.tokens] = self._prompt(q[prompt.tokens], cache, layer, prompt)
        for decode in plan.decodes:
            attend = self._sparse if decode.is_sparse else self._full
            out[decode.tokens] = attend(q[decode.tokens], cache, layer, decode)
        return out

    def _prompt(self, q: Tensor, cache: Tensor, layer: AttentionLayer, prompt: Prompt) -> Tensor:
        """[num_new, num_heads, head_size] to the same, over the whole past."""
        found = cache[prompt.blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)
        keys, values = self._rows.decode(found, layer.head_size)  # [num_kv_heads, num_keys, head_size] each
        parts: list[Tensor] = []
        for first in range(0, len(q), QUERIES):
            some = q[first : first + QUERIES]
            at = torch.arange(prompt.past + first, prompt.past + first + len(some), device=q.device)[:, None]
            key = torch.arange(prompt.begin, prompt.begin + keys.shape[1], device=q.device)
            mask = key <= at
            if layer.sliding_window is not None:
                mask &= key > at - layer.sliding_window
            parts.append(_attend(some.transpose(0, 1), keys, values, mask, layer).transpose(0, 1))
        return torch.cat(parts)

    def _full(self, q: Tensor, cache: Tensor, layer: AttentionLayer, decode: Decode) -> Tensor:
        """[n, num_heads, head_size] to the same, over all keys that are seen."""
        found = cache[decode.blocks].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
        keys, values = self._rows.decode(found, layer.head_size)
        return _attend(q[:, :, None], keys, values, decode.mask[:, None, None], layer)[:, :, 0]

    def _sparse(self, q: Tensor, cache: Tensor, layer: AttentionLayer, decode: Decode) -> Tensor:
        """The same over each head's heaviest tokens."""
        heads, size, r = layer.num_kv_heads, self.context.block_size, self._num_channels
        labels = self._labels(cache, decode.blocks).transpose(1, 2).flatten(2, 3)  # [n, kv_heads, num_keys, r]
        queries = q.unflatten(1, (heads, -1)).float()  # [n, kv_heads, group, head_size]
        scores = torch.matmul(queries[..., :r], labels.transpose(2, 3))
        scores.masked_fill_(~decode.mask[:, None, None], float("-inf"))
        found = scores.topk(min(self._num_tokens, scores.shape[-1]), sorted=False).indices  # [n, kv_heads, group, t]
        row = torch.arange(len(q), device=q.device)[:, None, None, None]
        head = torch.arange(heads, device=q.device)[None, :, None, None]
        blocks, offsets = decode.blocks[row, found // size], found % size
        rows = (cache[blocks, part, head, offsets] for part in range(2))
        keys, values = (self._rows.decode(x, layer.head_size).float() for x in rows)
        # A sequence with fewer tokens than are taken has some that it does not see.
        seen = decode.mask[row, found]
        weights = torch.einsum("nhgd,nhgtd->nhgt", queries, keys).mul_(layer.scale)
        weights = torch.softmax(weights.masked_fill_(~seen, float("-inf")), -1)
        return torch.einsum("nhgt,nhgtd->nhgd", weights, values).to(q.dtype).flatten(1, 2)

    def _labels(self, cache: Tensor, blocks: Tensor) -> Tensor:
        """The heavy channels of each key, [*blocks, num_kv_heads, block_size, r] in float32."""
        count = self._num_channels
        if cache.dtype != torch.uint8:
            return cache[blocks, 0, :, :, :count].float()
        width = -(-count // 4) * 4  # a quantised row ends with its scale
        rows = torch.cat((cache[blocks, 0, :, :, :width], cache[blocks, 0, :, :, -4:]), -1)
        return self._rows.decode(rows, count).float()

    def move(self, layers: list[AttentionLayer], source: Tensor, target: Tensor) -> None:
        move_rows(layers, source, target)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, layer: AttentionLayer) -> Tensor:
    """q: [..., num_heads, n, head_size]; k, v: [..., num_kv_heads, num_keys, head_size]; mask: [..., n, num_keys]."""
    is_grouped = layer.num_heads != layer.num_kv_heads
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scale, enable_gqa=is_grouped)
