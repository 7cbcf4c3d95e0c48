"""FlashInfer's paged wrappers behind the attention interface: planned once a step, run once a layer.

The cache is its "HND" layout, [num_blocks, 2, num_kv_heads, block_size, head_size]: the same as the torch backend's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import flashinfer  # pyright: ignore[reportMissingImports] - selected only where it is installed
from fwk.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer, BlockFormat, KVSpec
from fwk_attention._common.rows import block_format, move_rows, rows_of
from fwk_attention.flashinfer.plan import LayerKind, Pages, Slots, pages_of, slots_of, tree_mask

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from fwk.types import ForwardBatch

WORKSPACE_BYTES = 128 * 2**20
"""What FlashInfer's documentation advises; wrappers run one after another and share it."""

SMALL_GROUPS = (1, 2)
"""Query heads per KV head up to which decoding without matrix units is as good."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What ``forward`` needs; the wrappers hold the rest."""

    slots: dict[int, Slots]  # by KV group
    wrappers: dict[LayerKind, Any]


class FlashInferBackend(AttentionBackend):
    """Paged attention by FlashInfer."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self._rows = rows_of(context)
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=context.device)
        self._wrappers: dict[tuple[LayerKind, bool], Any] = {}

    def block_format(self, spec: KVSpec) -> BlockFormat:
        return block_format(spec, self.context.block_size, self._rows)

    def plan(self, batch: ForwardBatch, layers: list[AttentionLayer]) -> StepPlan:
        size, device = self.context.block_size, self.context.device
        pages: dict[int, Pages] = {}
        plan = StepPlan({}, {})
        for layer in layers:
            if layer.state is None:
                layer.state = LayerKind.of(layer)
            kind: LayerKind = layer.state
            if kind in plan.wrappers:
                continue
            if kind.kv_group not in pages:
                group = batch.kv_groups[kind.kv_group]
                pages[kind.kv_group] = pages_of(batch.seq_lens_np, group.block_table_np, size, device)
                plan.slots[kind.kv_group] = slots_of(group.slot_mapping_np, size, device)
            plan.wrappers[kind] = self._planned(batch, kind, pages[kind.kv_group])
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
        cache, slots = layer.kv_cache, plan.slots[layer.kv_group]
        assert cache is not None, "forward before the KV cache was allocated"
        assert v is not None, "this backend declares no latent layers"
        if slots.fresh is not None:
            # What an earlier owner left behind a sequence's end may be NaN, and is read, if only to be masked.
            cache.index_fill_(0, slots.fresh, 0)
        cache[slots.blocks, 0, :, slots.offsets] = k
        cache[slots.blocks, 1, :, slots.offsets] = v
        return plan.wrappers[layer.state].run(q, cache)

    def move(self, layers: list[AttentionLayer], source: Tensor, target: Tensor) -> None:
        move_rows(layers, source, target)

    def _planned(self, batch: ForwardBatch, kind: LayerKind, pages: Pages) -> Any:
        """The wrapper for this kind of layer, planned for this step."""
        decodes = batch.is_decode and batch.tree_mask is None
        wrapper = self._wrapper(kind, decodes)
        settings: dict[str, Any] = {
            "sm_scale": kind.scale,
            "logits_soft_cap": kind.soft_cap,
            "window_left": -1 if kind.sliding_window is None else kind.sliding_window - 1,  # keys before the query
            "q_data_type": self.context.dtype,
            "kv_data_type": self.context.dtype,
        }
        where = (pages.indptr, pages.indices, pages.last_page_len)
        shape = (kind.num_heads, kind.num_kv_heads, kind.head_size, self.context.block_size)
        if decodes:
            wrapper.plan(*where, *shape, **settings)
            return wrapper
        if batch.tree_mask is not None:
            settings |= {"custom_mask": tree_mask(batch, kind.sliding_window), "window_left": -1}
        starts = torch.from_numpy(batch.query_start_np.copy())  # the batch's own buffer changes with the next step
        wrapper.plan(starts, *where, *shape, causal=batch.tree_mask is None, **settings)
        return wrapper

    def _wrapper(self, kind: LayerKind, decodes: bool) -> Any:
        key = (kind, decodes)
        if key not in self._wrappers:
            if decodes:
                has_large_group = kind.num_heads // kind.num_kv_heads not in SMALL_GROUPS
                made = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace, "HND", use_tensor_cores=has_large_group
                )
            else:
                made = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
            self._wrappers[key] = made
        return self._wrappers[key]
