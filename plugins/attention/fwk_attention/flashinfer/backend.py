"""FlashInfer's paged wrappers behind the attention interface: planned once a step, run once a layer.

The cache is its "HND" layout, [num_blocks, 2, num_kv_heads, block_size, head_size]: the same as the torch backend's.
Its kernels take one scale for all of K and one for all of V, where the other backends keep one per token and head. So
``fp8_e4m3`` is a format of its own here: numbers are divided by the layer's scale in the checkpoint (1 where there is
none, and in latent layers), those then beyond 448 are stored as 448.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fwk.errors import ConfigError
from fwk.interfaces.attention import (
    AttentionBackend,
    AttentionContext,
    AttentionLayer,
    BlockFormat,
    CaptureSizes,
    KVSpec,
)
from fwk_attention._common.rows import PlainRows, block_format, move_rows
from fwk_attention._common.staging import PlanBuffers
from fwk_attention.flashinfer.captured import CapturedDecodes
from fwk_attention.flashinfer.plan import (
    LayerKind,
    Mode,
    Pages,
    Part,
    Slots,
    pages_of,
    parts_of,
    pinned,
    slots_of,
    tree_mask,
)
from fwk_attention.flashinfer.wrappers import PlannedWrapper, Wrappers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from fwk.types import ForwardBatch

LARGEST_FP8 = 448.0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What ``forward`` needs; the wrappers hold the rest."""

    slots: dict[int, Slots]  # by KV group
    runs: dict[LayerKind, list[tuple[Part, PlannedWrapper]]]


class FlashInferBackend(AttentionBackend):
    """Paged attention by FlashInfer."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self._kv_dtype = context.dtype if context.kv_dtype == "auto" else torch.float8_e4m3fn
        make_event = torch.cuda.Event if context.device.type == "cuda" else None
        prompt_kernel = context.options.flashinfer_prompt_kernel
        if prompt_kernel == "fa3" and self._kv_dtype != context.dtype:
            raise ConfigError(
                "--flashinfer-prompt-kernel fa3 reads K/V of the model's own precision alone: leave it or "
                "--kv-cache-dtype out"
            )
        self._wrappers = Wrappers(context.device, self._kv_dtype, make_event, prompt_kernel)
        self._buffers = PlanBuffers(context)
        self._captured: CapturedDecodes | None = None

    def block_format(self, spec: KVSpec) -> BlockFormat:
        return block_format(spec, self.context.block_size, PlainRows(self._kv_dtype))

    def plan(self, batch: ForwardBatch, layers: list[AttentionLayer]) -> StepPlan:
        size = self.context.block_size
        pages: dict[tuple[int, int], Pages] = {}
        plan = StepPlan({}, {})
        self._buffers.turn()
        for layer in layers:
            if layer.state is None:
                layer.state = LayerKind.of(layer)
            kind: LayerKind = layer.state
            if kind in plan.runs:
                continue
            group = batch.kv_groups[kind.kv_group]
            if kind.kv_group not in plan.slots:
                self._expect(layer, kind, len(group.slot_mapping_np))
                send = partial(_send, self._buffers, f"{{}} {kind.kv_group}")
                plan.slots[kind.kv_group] = slots_of(group.slot_mapping_np, size, send)
            runs = plan.runs[kind] = []
            for part in parts_of(batch, kind.is_latent):
                key = (kind.kv_group, part.sequences.start)
                if key not in pages:
                    pages[key] = self._pages(batch, part, kind.kv_group)
                runs.append((part, self._planned(batch, kind, part, pages[key])))
        self._buffers.sent()
        return plan

    def init_capture(self, layers: list[AttentionLayer], sizes: CaptureSizes) -> None:
        groups = {layer.kv_group for layer in layers}
        self._captured = CapturedDecodes(self._buffers, self._wrappers, groups, sizes, self.context.block_size)

    def plan_static(self, batch: ForwardBatch, layers: list[AttentionLayer]) -> StepPlan | None:
        captured = self._captured
        assert captured is not None, "init_capture comes first"
        if not captured.fits(batch):
            return None
        plan, pages = StepPlan({}, {}), dict[int, Pages]()
        self._buffers.turn()
        for layer in layers:
            if layer.state is None:
                layer.state = LayerKind.of(layer)
            kind: LayerKind = layer.state
            if kind in plan.runs:
                continue
            group, part = batch.kv_groups[kind.kv_group], captured.part(batch, kind)
            if kind.kv_group not in plan.slots:
                self._expect(layer, kind)
                plan.slots[kind.kv_group] = captured.slots(kind.kv_group, group)
                pages[kind.kv_group] = self._pages(batch, part, kind.kv_group)
            wrapper = captured.wrapper(kind, part.mode, batch.num_seqs)
            plan.runs[kind] = [(part, self._planned(batch, kind, part, pages[kind.kv_group], wrapper))]
        self._buffers.sent()
        return plan

    def _expect(self, layer: AttentionLayer, kind: LayerKind, num_tokens: int = 0) -> None:
        """Make room for what steps send: of pages as many as there are, which sequences that share some may exceed."""
        num_blocks = 0 if layer.kv_cache is None else layer.kv_cache.shape[0]
        for part in ("rest",) if kind.is_latent else ("decode", "rest"):
            self._buffers.expect(f"pages {kind.kv_group} {part}", (), torch.int32, num_blocks)
        for name in ("blocks", "offsets", "fresh") if num_tokens else ():
            self._buffers.expect(f"{name} {kind.kv_group}", (), torch.int64, num_tokens)

    def _pages(self, batch: ForwardBatch, part: Part, kv_group: int) -> Pages:
        lens, table = batch.seq_lens_np[part.sequences], batch.kv_groups[kv_group].block_table_np[part.sequences]
        # Not by where it starts: each number of sequences that decode alongside prompts would have a buffer.
        name = f"pages {kv_group} {'decode' if part.mode is Mode.DECODE else 'rest'}"
        send = partial(self._buffers.send, name)
        return pages_of(lens, table, self.context.block_size, self.context.device, send)

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
        cache = layer.kv_cache
        assert cache is not None, "forward before the KV cache was allocated"
        scales: dict[str, float | None] = {}
        if self._kv_dtype == torch.float8_e4m3fn and v is not None:
            scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
        self._store(cache, 0, k, plan.slots[layer.kv_group], scales.get("k_scale"))
        if v is not None:
            self._store(cache, 1, v, plan.slots[layer.kv_group], scales.get("v_scale"))
        sinks = layer.extras.get("sinks")
        out = q.new_empty((*q.shape[:2], layer.value_head_size))
        for part, wrapper in plan.runs[layer.state]:
            mine = out[part.tokens]
            if part.mode is Mode.LATENT:
                size, latents = layer.value_head_size, cache[:, 0, 0]  # [num_blocks, block_size, head_size]
                queries = {"q_nope": q[..., :size], "q_pe": q[..., size:]}
                wrapper.run(**queries, ckv_cache=latents[..., :size], kpe_cache=latents[..., size:], out=mine)
            elif sinks is None:
                wrapper.run(q[part.tokens], cache, out=mine, **scales)
            else:
                _, lse = wrapper.run(q[part.tokens], cache, out=mine, return_lse=True, **scales)
                _share_with_sinks(mine, lse, sinks)
        return out

    def move(self, layers: list[AttentionLayer], source: Tensor, target: Tensor) -> None:
        move_rows(layers, source, target)

    def _store(self, cache: Tensor, part: int, x: Tensor, slots: Slots, scale: float | None) -> None:
        """x: [num_tokens, num_kv_heads, head_size]"""
        if self._kv_dtype == torch.float8_e4m3fn:
            x = x if scale is None else x / scale
            x = x.clamp(-LARGEST_FP8, LARGEST_FP8).to(self._kv_dtype).view(torch.uint8)
            cache = cache.view(torch.uint8)  # indexing moves bytes, whatever the device does with the type
        if slots.fresh is not None and part == 0:
            # What an earlier owner left behind a sequence's end may be NaN, and is read, if only to be masked.
            cache.index_fill_(0, slots.fresh, 0)
        cache[slots.blocks, part, :, slots.offsets] = x

    def _planned(
        self, batch: ForwardBatch, kind: LayerKind, part: Part, pages: Pages, wrapper: PlannedWrapper | None = None
    ) -> PlannedWrapper:
        """The wrapper for this kind of layer, planned for this part of the step."""
        wrapper = self._wrappers.next(kind, part.mode) if wrapper is None else wrapper
        types = {"q_data_type": self.context.dtype, "kv_data_type": self._kv_dtype}
        size = self.context.block_size
        first = part.sequences.start
        # Of a copy: the batch's own buffer changes with the next step.
        starts = batch.query_start_np[first : part.sequences.stop + 1] - batch.query_start_np[first]
        if part.mode is Mode.LATENT:
            wrapper.plan(
                qo_indptr=pinned(starts, self.context.device),
                kv_indptr=pages.indptr,
                kv_indices=pages.indices,
                kv_len_arr=pages.seq_lens,
                num_heads=kind.num_heads,
                head_dim_ckv=kind.value_head_size,
                head_dim_kpe=kind.head_size - kind.value_head_size,
                page_size=size,
                causal=True,
                sm_scale=kind.scale,
                **types,
            )
            return wrapper
        settings: dict[str, Any] = {
            "num_qo_heads": kind.num_heads,
            "num_kv_heads": kind.num_kv_heads,
            "page_size": size,
            "sm_scale": kind.scale,
            "logits_soft_cap": kind.soft_cap,
            "window_left": -1 if kind.sliding_window is None else kind.sliding_window - 1,  # keys before the query
            **types,
        }
        if part.mode is Mode.DECODE:
            where = {"indptr": pages.indptr, "indices": pages.indices, "last_page_len": pages.last_page_len}
            wrapper.plan(**where, head_dim=kind.head_size, **settings)
            return wrapper
        if part.mode is Mode.TREE:
            settings |= {"custom_mask": tree_mask(batch, part, kind.sliding_window), "window_left": -1}
        wrapper.plan(
            qo_indptr=pinned(starts, self.context.device),
            paged_kv_indptr=pages.indptr,
            paged_kv_indices=pages.indices,
            paged_kv_last_page_len=pages.last_page_len,
            head_dim_qk=kind.head_size,
            causal=part.mode is Mode.CAUSAL,
            **settings,
        )
        return wrapper


def _send(buffers: PlanBuffers, name: str, part: str, values: Any) -> Tensor:
    return buffers.send(name.format(part), values)


def _share_with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Give each sink its share of the softmax, in place.

    FlashInfer's own argument ``sinks`` is read by some of its backends, and ignored by fa2 and fa3. The sums of the
    scores' exponentials, of which it returns the logarithm to base 2, say the same: sum / (sum + exp(sink)).

    out: [num_tokens, num_heads, size]; lse: [num_tokens, num_heads] float32; sinks: [num_heads] float32.
    """
    out.mul_(torch.sigmoid(lse * math.log(2.0) - sinks).unsqueeze(-1))
