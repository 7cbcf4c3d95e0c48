"""Launches the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from fwk.errors import ConfigError
from fwk.interfaces.attention import (
    AttentionBackend,
    AttentionContext,
    AttentionLayer,
    BlockFormat,
    CaptureSizes,
    KVKind,
    KVSpec,
    Turn,
)
from fwk_attention._common.rows import block_format, move_rows, rows_of
from fwk_attention._common.staging import PlanBuffers
from fwk_attention.triton_paged.captured import CapturedDecodes
from fwk_attention.triton_paged.kernels import attend_tiles, join_parts
from fwk_attention.triton_paged.plan import (
    INTERPRETED,
    Launch,
    LayerKind,
    deterministic,
    device_sizes,
    plan_launches,
    power_of_two,
    sent_names,
    shortened,
)
from fwk_attention.triton_paged.rows import FP8, INT8, PLAIN, store_rows, turn_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from fwk.types import ForwardBatch


@dataclass(frozen=True, slots=True)
class LayerState:
    """What the kernels know of a layer's cache."""

    kind: LayerKind
    cache: Tensor
    scales: Tensor  # the same memory as float32, or the cache itself where nothing is scaled
    value_offset: int  # elements from a row of K to that of V; 0 in a latent layer
    rest: int  # of K beyond the value, in a latent layer
    width: int
    rest_width: int


class TritonBackend(AttentionBackend):
    """Paged attention in Triton."""

    turns = True

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        if context.is_deterministic and context.options.triton_attention_cascade:
            raise ConfigError(
                "--triton-attention-cascade computes the keys that sequences of a step share in larger tiles, in which "
                "matrix units add up in another order: leave it or --enable-deterministic-inference out"
            )
        self._rows = rows_of(context)
        self._format = {"auto": PLAIN, "int8": INT8, "fp8_e4m3": FP8}[context.kv_dtype].value
        self._is_interpreted = context.device.type != "cuda"
        self._buffers = PlanBuffers(context)
        self._planned = set[LayerKind]()
        self._workspace = Workspace(context.device)
        self._captured: CapturedDecodes | None = None

    def block_format(self, spec: KVSpec) -> BlockFormat:
        return block_format(spec, self.context.block_size, self._rows)

    def plan(self, batch: ForwardBatch, layers: list[AttentionLayer]) -> dict[LayerKind, list[Launch]]:
        self._buffers.turn()
        kinds = dict.fromkeys(self._state(layer).kind for layer in layers)
        for kind in kinds.keys() - self._planned:
            self._planned.add(kind)
            for name, width in sent_names(kind).items():
                self._buffers.expect(name, (width,), torch.int32)
        plan = {kind: plan_launches(batch, kind, self._buffers.send) for kind in kinds}
        self._buffers.sent()
        return shortened(plan, batch)

    def init_capture(self, layers: list[AttentionLayer], sizes: CaptureSizes) -> None:
        kinds: dict[LayerKind, tuple[int, int]] = {}
        for layer in layers:
            kind = self._state(layer).kind
            programs, size = kinds.get(kind, (0, 0))
            kinds[kind] = max(programs, _programs(layer, kind)), max(size, layer.value_head_size)
        tokens = sizes.num_blocks * self.context.block_size * sizes.rows_per_seq
        self._captured = CapturedDecodes(self._buffers, list(kinds), sizes.num_seqs, sizes.max_seq_len, tokens)
        most = self._captured.capacity(sizes.num_seqs)
        self._workspace.reserve(
            max(most * programs * kind.sizes.short_rows * size for kind, (programs, size) in kinds.items()),
            max(most * programs * kind.sizes.short_rows for kind, (programs, _) in kinds.items()),
        )

    def plan_static(self, batch: ForwardBatch, layers: list[AttentionLayer]) -> dict[LayerKind, list[Launch]] | None:
        assert self._captured is not None, "init_capture comes first"
        plan = self._captured.plan(batch)
        return None if plan is None else shortened(plan, batch)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        extra: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        state = self._state(layer)
        self._store(k, v, state, batch.kv_groups[layer.kv_group].slot_mapping)
        return self._attended(_unit_stride(q), layer, state, batch)

    def forward_turned(self, qkv: Tensor, layer: AttentionLayer, batch: ForwardBatch, turn: Turn) -> Tensor:
        state, qkv = self._state(layer), _unit_stride(qkv)
        self._turn(qkv, turn, layer, state, batch.kv_groups[layer.kv_group].slot_mapping)
        return self._attended(qkv[:, : layer.num_heads], layer, state, batch)

    def _attended(self, q: Tensor, layer: AttentionLayer, state: LayerState, batch: ForwardBatch) -> Tensor:
        out = torch.empty((*q.shape[:2], layer.value_head_size), dtype=q.dtype, device=q.device)
        for launch in batch.plan[state.kind]:
            self._attend(q, out, layer, state, batch, launch)
        return out

    def move(self, layers: list[AttentionLayer], source: Tensor, target: Tensor) -> None:
        move_rows(layers, source, target)

    def _kind(self, layer: AttentionLayer) -> LayerKind:
        sizes = INTERPRETED
        if not self._is_interpreted:
            sizes = device_sizes(layer.head_size, layer.value_head_size, self.context.dtype.itemsize)
        if self.context.is_deterministic:
            sizes = deterministic(sizes)
        group, options = layer.num_heads // layer.num_kv_heads, self.context.options
        window, is_deterministic = layer.sliding_window, self.context.is_deterministic
        shared = self.context.block_size if options.triton_attention_cascade and window is None else 0
        split = options.triton_attention_split_tile_size
        return LayerKind(layer.kv_group, group, window, sizes, split, is_deterministic, shared)

    def _state(self, layer: AttentionLayer) -> LayerState:
        state: LayerState | None = layer.state
        if state is None or state.cache is not layer.kv_cache:
            cache = layer.kv_cache
            assert cache is not None, "plan before the KV cache was allocated"
            rest = layer.head_size - layer.value_head_size
            state = layer.state = LayerState(
                kind=self._kind(layer),
                cache=cache,
                scales=cache if self._format == PLAIN.value else cache.view(torch.float32),
                value_offset=0 if layer.kind is KVKind.LATENT else cache.stride(1),
                rest=rest,
                width=power_of_two(layer.value_head_size, 16),
                rest_width=power_of_two(max(rest, 1), 16),
            )
        return state

    def _store(self, k: Tensor, v: Tensor | None, state: LayerState, slots: Tensor) -> None:
        """k, v: [num_tokens, num_kv_heads, head_size]; where a layer has both, they lie in rows of one size."""
        k, cache = _unit_stride(k), state.cache
        num_tokens, heads, size = k.shape
        parts, v = (1, k) if v is None else (2, _unit_stride(v))
        assert v.shape == k.shape, "K and V are stored in one launch"
        at_once = state.kind.sizes.tokens
        _launch(
            store_rows,
            (triton.cdiv(num_tokens, at_once), parts * heads),
            k,
            k.stride(0),
            k.stride(1),
            v,
            v.stride(0),
            v.stride(1),
            cache,
            state.scales,
            slots,
            num_tokens,
            heads,
            state.value_offset,
            SIZE=size,
            ROW=cache.shape[4],
            BLOCK_SIZE=cache.shape[3],
            BLOCK_STRIDE=cache.stride(0),
            FORMAT=self._format,
            TOKENS=at_once,
            WIDTH=power_of_two(size, 16),
        )

    def _turn(self, qkv: Tensor, turn: Turn, layer: AttentionLayer, state: LayerState, slots: Tensor) -> None:
        cache, at_once, half = state.cache, state.kind.sizes.tokens, layer.head_size // 2
        _launch(
            turn_rows,
            (triton.cdiv(len(qkv), at_once), qkv.shape[1]),
            qkv,
            qkv.stride(0),
            qkv.stride(1),
            qkv if turn.weight is None else turn.weight,
            turn.cos,
            turn.cos.stride(0),
            turn.sin,
            turn.sin.stride(0),
            cache,
            state.scales,
            slots,
            len(qkv),
            layer.num_heads,
            layer.num_kv_heads,
            state.value_offset,
            turn.eps,
            HALF=half,
            ROW=cache.shape[4],
            BLOCK_SIZE=cache.shape[3],
            BLOCK_STRIDE=cache.stride(0),
            FORMAT=self._format,
            NORMS=turn.weight is not None,
            ROUNDS_LAST=turn.rounds_last,
            TOKENS=at_once,
            WIDTH=power_of_two(half, 16),
            IS_INTERPRETED=self._is_interpreted,
        )

    def _attend(
        self, q: Tensor, out: Tensor, layer: AttentionLayer, state: LayerState, batch: ForwardBatch, launch: Launch
    ) -> None:
        kind, cache, table = state.kind, state.cache, batch.kv_groups[layer.kv_group].block_table
        tree = batch.tree_mask
        tree = batch.positions if tree is None else tree.view(torch.uint8)
        programs = _programs(layer, kind)
        size, rows = layer.value_head_size, launch.rows
        parts, stats = self._workspace.take(launch.num_parts * programs * rows, size)
        tile = {"GROUP": kind.group, "HEADS": kind.heads, "SIZE": size, "WIDTH": state.width}
        for tiles, slots in ((launch.shared, kind.slots), (launch.tiles, 0)):
            if tiles is None:
                continue
            _launch(
                attend_tiles,
                (tiles.shape[0], programs),
                q,
                q.stride(0),
                q.stride(1),
                out,
                cache,
                state.scales,
                tiles,
                table,
                table.stride(0),
                batch.positions,
                tree,
                tree.stride(0),
                parts,
                stats,
                layer.num_heads,
                layer.scale,
                layer.soft_cap or 1.0,
                **tile,
                ROWS=kind.sizes.rows if slots else rows,
                PART_ROWS=rows,
                SLOTS=slots,
                REST=state.rest,
                REST_WIDTH=state.rest_width,
                ROW=cache.shape[4],
                BLOCK_SIZE=cache.shape[3],
                BLOCK_STRIDE=cache.stride(0),
                VALUE_OFFSET=state.value_offset,
                WINDOW=layer.sliding_window or 0,
                HAS_CAP=layer.soft_cap is not None,
                IS_TREE=batch.tree_mask is not None and not slots,
                FORMAT=self._format,
                KEYS=kind.sizes.shared_keys if slots else kind.sizes.keys,
                IS_INTERPRETED=self._is_interpreted,
                num_stages=2,
            )
        if launch.joins is not None:
            grid = (launch.joins.shape[0], programs)
            _launch(join_parts, grid, out, launch.joins, parts, stats, layer.num_heads, **tile, ROWS=rows)


class Workspace:
    """Partial outcomes of split tiles, and their maxima and sums: float32, used by one layer after another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reserved = self._grown = self._make(0, 0)

    def reserve(self, num_numbers: int, num_rows: int) -> None:
        """Once: what stays where it is, for captured steps; others use it while it is enough."""
        self._reserved = self._make(num_numbers, num_rows)

    def take(self, rows: int, size: int) -> tuple[Tensor, Tensor]:
        """Room for that many rows of partial outcomes, and for their maxima and sums."""
        for parts, stats in (self._reserved, self._grown):
            if parts.numel() >= rows * size and stats.numel() >= rows * 2:
                return parts, stats
        self._grown = self._make(rows * size * 5 // 4, rows * 5 // 4)
        return self._grown

    def _make(self, num_numbers: int, num_rows: int) -> tuple[Tensor, Tensor]:
        return (
            torch.empty(num_numbers, dtype=torch.float32, device=self._device),
            torch.empty(num_rows * 2, dtype=torch.float32, device=self._device),
        )


def _programs(layer: AttentionLayer, kind: LayerKind) -> int:
    """Programs of a tile."""
    return layer.num_kv_heads * triton.cdiv(kind.group, kind.heads)


def _launch(kernel: Any, grid: tuple[int, int], *arguments: Any, **constants: Any) -> None:
    """Arguments of a kernel are what its decorator makes of them: no type checker knows it."""
    kernel[grid](*arguments, **constants)


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
