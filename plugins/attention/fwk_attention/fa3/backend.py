"""FlashAttention 3 behind the attention interface: K and V are stored by torch, and one launch a layer attends.

A block is [2 (K, V), block_size, num_kv_heads, head_size], as its kernels have pages. A step's lengths and block tables
are on the device as they want them: there is nothing to plan there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fwk.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer, BlockFormat, KVSpec
from fwk_attention.fa3.kernels import Step, find

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Where a KV group's new tokens go; fresh: blocks whose first slot is among them."""

    blocks: Tensor  # [num_tokens] int64
    offsets: Tensor  # [num_tokens] int64
    fresh: Tensor | None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """By KV group, and by KV group and window."""

    groups: dict[int, GroupPlan]
    steps: dict[tuple[int, int | None], Step]


class FA3Backend(AttentionBackend):
    """Paged attention by FlashAttention 3."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self._attend = find()

    def block_format(self, spec: KVSpec) -> BlockFormat:
        shape = (2, self.context.block_size, spec.num_kv_heads, spec.head_size)
        return BlockFormat(shape, self.context.dtype, head_dim=2)

    def plan(self, batch: ForwardBatch, layers: list[AttentionLayer]) -> StepPlan:
        plan, size = StepPlan({}, {}), self.context.block_size
        for layer in layers:
            key = layer.kv_group, layer.sliding_window
            if key in plan.steps:
                continue
            group = batch.kv_groups[layer.kv_group]
            if layer.kv_group not in plan.groups:
                slots, on_host = group.slot_mapping, group.slot_mapping_np
                fresh = np.ascontiguousarray(on_host[on_host % size == 0] // size, np.int64)
                plan.groups[layer.kv_group] = GroupPlan(
                    slots // size, slots % size, self.context.send(fresh) if len(fresh) else None
                )
            window = (-1, -1) if layer.sliding_window is None else (layer.sliding_window - 1, 0)
            plan.steps[key] = Step(
                batch.query_start,
                batch.seq_lens,
                group.block_table,
                int(np.diff(batch.query_start_np).max()),
                int(batch.seq_lens_np.max()),
                window,
            )
        return plan

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        extra: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        plan: StepPlan = batch.plan
        cache, group = layer.kv_cache, plan.groups[layer.kv_group]
        assert cache is not None, "forward before the KV cache was allocated"
        assert v is not None, "latent layers are not served"
        if group.fresh is not None:
            # What an earlier owner left behind a sequence's end may be NaN, and is read, if only to be masked.
            cache.index_fill_(0, group.fresh, 0)
        cache[group.blocks, 0, group.offsets] = k
        cache[group.blocks, 1, group.offsets] = v
        step = plan.steps[layer.kv_group, layer.sliding_window]
        return self._attend(q.contiguous(), cache[:, 0], cache[:, 1], step, layer.scale, layer.soft_cap or 0.0)
