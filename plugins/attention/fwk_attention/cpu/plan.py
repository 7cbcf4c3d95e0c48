"""What all layers of a step share: tasks of the kernel, and its structures (the same as in attention.cpp)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.attention import AttentionLayer
    from fwk.types import ForwardBatch

MAX_ROWS = 96
"""Rows of a task (query tokens times the query heads of a KV head): laying out a tile of keys costs as much as 4 rows'
products, and sums of 96 rows of 64 numbers take 24 KiB."""

FEW_ROWS = 48
"""Up to here the keys are cut into ranges, so that one long sequence keeps all threads busy."""

RANGE = 512
"""Keys of such a range."""

FEW_SCORES = 4096
"""Up to so many rows times keys over all tasks and KV heads one thread computes alone: waking others takes longer."""

TASK = np.dtype(
    [
        (name, np.int32)
        for name in (
            *("seq", "first", "count", "place", "first_key", "last_key", "past"),
            *("part", "first_part", "num_parts"),
        )
    ]
)


class PlanStruct(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tasks", "slots", "table", "positions", "tree", "parts", "finished")),
        *((name, ctypes.c_int64) for name in ("table_width", "tree_width", "num_tasks", "num_tokens")),
        ("part_rows", ctypes.c_int64),
    ]


class LayerStruct(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_size", "block_size", "window")),
        *((name, ctypes.c_float) for name in ("scale", "soft_cap")),
    ]


class AttendStruct(ctypes.Structure):
    _fields_ = [
        *((name, kind) for x in "qkv" for name, kind in ((x, ctypes.c_void_p), (f"{x}_stride", ctypes.c_int64))),
        *((name, ctypes.c_void_p) for name in ("cache", "out", "layer", "plan")),
    ]


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers alike in this share one plan."""

    kv_group: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    sliding_window: int | None

    @staticmethod
    def of(layer: AttentionLayer) -> LayerKind:
        return LayerKind(layer.kv_group, layer.num_heads, layer.num_kv_heads, layer.head_size, layer.sliding_window)


@dataclass(frozen=True, slots=True)
class LayerState:
    """What is kept with a layer."""

    kind: LayerKind
    struct: LayerStruct
    address: int

    @staticmethod
    def of(layer: AttentionLayer, block_size: int) -> LayerState:
        struct = LayerStruct(
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_size,
            block_size,
            layer.sliding_window or 0,
            layer.scale,
            layer.soft_cap or 0.0,
        )
        return LayerState(LayerKind.of(layer), struct, ctypes.addressof(struct))


@dataclass(frozen=True, slots=True)
class Plan:
    """One step for one kind of layer. ``kept`` holds what the structure points at."""

    struct: PlanStruct
    is_small: bool
    kept: tuple[Any, ...]


def make_plan(kind: LayerKind, batch: ForwardBatch, struct: PlanStruct) -> Plan:
    """Plan a step in ``struct``, where recorded steps expect it."""
    group = batch.kv_groups[kind.kv_group]
    tasks, num_parts, part_rows, num_scores = _tasks(kind, batch)
    slots = np.ascontiguousarray(group.slot_mapping_np, np.int64)
    table = np.ascontiguousarray(group.block_table_np, np.int32)
    tree, positions = batch.tree_mask, batch.positions
    if tree is not None:
        tree, positions = tree.contiguous(), positions.contiguous()
    parts: Tensor | None = None
    finished: Any = None
    if num_parts:
        width = -(-kind.head_size // 16) * 16 + 2
        parts = torch.empty(num_parts * kind.num_kv_heads * part_rows * width)
        finished = np.zeros(num_parts * kind.num_kv_heads, np.int32)
    struct.__init__(
        tasks.ctypes.data,
        slots.ctypes.data,
        table.ctypes.data,
        positions.data_ptr(),
        None if tree is None else tree.data_ptr(),
        None if parts is None else parts.data_ptr(),
        None if finished is None else finished.ctypes.data,
        table.shape[1],
        0 if tree is None else tree.shape[1],
        len(tasks),
        len(slots),
        part_rows,
    )
    return Plan(struct, num_scores <= FEW_SCORES, (tasks, slots, table, tree, positions, parts, finished))


def _tasks(kind: LayerKind, batch: ForwardBatch) -> tuple[Any, int, int, int]:
    """Tasks, the number of parts to merge, the most rows of a part, and the scores of all KV heads together.

    How a sequence is cut depends on nothing but its own lengths.
    """
    starts = np.asarray(batch.query_start_np, np.int64)
    num_new, lens = np.diff(starts), np.asarray(batch.seq_lens_np, np.int64)
    heads = kind.num_heads // kind.num_kv_heads
    tokens = max(1, MAX_ROWS // heads)
    # Cut the new tokens of each sequence into groups ...
    seq, at = _spread(-(-num_new // tokens))
    offset = at * tokens
    count = np.minimum(num_new[seq] - offset, tokens)
    past = (lens - num_new)[seq]
    place = past + offset
    is_tree = batch.tree_mask is not None
    last = lens[seq] if is_tree else place + count
    lowest = past if is_tree else place
    first = np.zeros_like(place) if kind.sliding_window is None else np.maximum(lowest - kind.sliding_window + 1, 0)
    # ... and where these have few rows, the keys into ranges, at multiples of RANGE.
    low, high = first // RANGE, -(-last // RANGE)
    ranges = np.where(num_new[seq] * heads <= FEW_ROWS, high - low, 1)
    index, which = _spread(ranges)
    cut = (low[index] + which) * RANGE
    is_cut = ranges[index] > 1
    before = np.cumsum(np.where(ranges > 1, ranges, 0)) - np.where(ranges > 1, ranges, 0)
    tasks = np.zeros(len(index), TASK)
    tasks["seq"], tasks["first"], tasks["count"] = seq[index], (starts[:-1][seq] + offset)[index], count[index]
    tasks["place"], tasks["past"] = place[index], past[index]
    tasks["first_key"] = np.where(is_cut, np.maximum(cut, first[index]), first[index])
    tasks["last_key"] = np.where(is_cut, np.minimum(cut + RANGE, last[index]), last[index])
    tasks["part"] = np.where(is_cut, before[index] + which, -1)
    tasks["first_part"], tasks["num_parts"] = before[index], ranges[index]
    num_parts = int(np.where(ranges > 1, ranges, 0).sum())
    part_rows = int((count[index] * heads)[is_cut].max()) if num_parts else 0
    num_keys = (tasks["last_key"] - tasks["first_key"]).astype(np.int64)
    return tasks, num_parts, part_rows, int((num_keys * tasks["count"]).sum()) * kind.num_heads


def _spread(counts: Any) -> tuple[Any, Any]:
    """For counts [2, 0, 3] the owners [0, 0, 2, 2, 2] and the place of each among its owner's, [0, 1, 0, 1, 2]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
