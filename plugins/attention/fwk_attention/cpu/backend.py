"""Hand each layer's pointers to the kernel."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import fwk_native as native
from fwk.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer, BlockFormat, KVSpec
from fwk_attention.cpu.layout import Layout
from fwk_attention.cpu.plan import (
    MAX_ROWS,
    MAX_ROWS_8BIT,
    MAX_ROWS_TILES,
    AttendStruct,
    LayerKind,
    LayerState,
    Plan,
    Planner,
)
from fwk_native.thread_pool import operator

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from fwk.types import ForwardBatch


def source_of(computed: str, kv_dtype: str) -> Path:
    """The file whose library attends in ``computed`` to a cache of ``kv_dtype``: each is compiled where it is used."""
    return Path(__file__).with_name(f"attention_{computed}{'' if kv_dtype == 'auto' else '_quantised'}.cpp")


class CpuBackend(AttentionBackend):
    """Paged attention that reads K and V in place, laid out for its products when they are stored."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        has_pairs = context.dtype == torch.bfloat16 and native.has_pairs(native.isa())
        stored = context.dtype if context.kv_dtype == "auto" else torch.uint8
        self._layout = Layout(context.block_size, 2 if has_pairs else 1, stored, bool(context.kv_layout))
        computed = "bfloat16" if context.dtype == torch.bfloat16 else "float32"
        library = native.load(source_of(computed, context.kv_dtype))
        self._attend = operator(library, f"attend_{computed}_{context.kv_dtype}")
        max_rows = MAX_ROWS_8BIT if self._layout.is_quantised else MAX_ROWS
        if has_pairs and native.has_tiles(native.isa()):
            max_rows = MAX_ROWS_TILES
        self._planner = Planner(library, context.block_size, max_rows)
        self._layers: list[AttentionLayer] = []  # that the latest plan was for, and their kinds
        self._kinds: list[LayerKind] = []

    def block_format(self, spec: KVSpec) -> BlockFormat:
        return self._layout.block_format(spec)

    def plan(self, batch: ForwardBatch, layers: list[AttentionLayer]) -> dict[LayerKind, Plan]:
        if layers is not self._layers:
            self._layers, self._kinds = layers, self._kinds_of(layers)
        return {kind: self._planner.make(kind, batch) for kind in self._kinds}

    def _kinds_of(self, layers: list[AttentionLayer]) -> list[LayerKind]:
        for layer in layers:
            if layer.state is None:
                is_tiled = self._layout.is_tiled(layer.head_size)
                layer.state = LayerState.of(layer, self.context.block_size, is_tiled)
        return list(dict.fromkeys(layer.state.kind for layer in layers))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        extra: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        assert layer.kv_cache is not None, "forward before the KV cache was allocated"
        assert v is not None, "latent layers are not served"
        state: LayerState = layer.state
        q, k, v = (_heads_together(x, self.context.dtype) for x in (q, k, v))
        out = torch.empty(q.shape, dtype=q.dtype)
        plan: Plan = batch.plan[state.kind]
        args = AttendStruct(
            *(q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)),
            *(layer.kv_cache.data_ptr(), out.data_ptr(), state.address, ctypes.addressof(plan.struct)),
        )
        self.context.threads.run(self._attend, args, is_small=plan.is_small)
        return out

    def move(self, layers: list[AttentionLayer], source: Tensor, target: Tensor) -> None:
        for layer in layers:
            self._layout.move(layer, source, target)


def _heads_together(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[num_tokens, heads, head_size] such that a token's numbers lie in a row."""
    if x.dtype != dtype:
        raise TypeError(f"attention in {dtype} was given {x.dtype}")
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
