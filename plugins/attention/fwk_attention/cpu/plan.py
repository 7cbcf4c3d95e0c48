"""What all layers of a step share: tasks of the kernel, and its structures (the same as in attention.cpp)."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.attention import AttentionLayer
    from fwk.types import ForwardBatch

MAX_ROWS = 96
"""Rows of a task (query tokens times the query heads of a KV head): a tile of keys is fetched once for all of them, and
their sums and scores stay within a core's cache."""

FEW_ROWS = 48
"""Up to here the keys are cut into ranges, so that one long sequence keeps all threads busy, and sequences that share
blocks read them together."""

RANGE = 256
"""Keys of such a range."""

FEW_SCORES = 4096
"""Up to so many rows times keys over all tasks and KV heads one thread computes alone: waking others takes longer."""

MEMBER = np.dtype(
    [(name, np.int32) for name in ("seq", "first", "count", "place", "past", "part", "first_part", "num_parts")]
)
TASK = np.dtype([(name, np.int32) for name in ("first_member", "num_members", "first_key", "last_key")])


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class PlanStruct(ctypes.Structure):
    _fields_ = [
        *_fields(ctypes.c_void_p, "members tasks slots table positions tree parts finished"),
        *_fields(ctypes.c_int64, "table_width tree_width num_tasks num_tokens part_rows"),
    ]


class LayerStruct(ctypes.Structure):
    _fields_ = [
        *_fields(ctypes.c_int64, "num_heads num_kv_heads head_size block_size window is_tiled"),
        *_fields(ctypes.c_float, "scale soft_cap"),
    ]


class AttendStruct(ctypes.Structure):
    _fields_ = [
        *(field for x in "qkv" for field in ((x, ctypes.c_void_p), (f"{x}_stride", ctypes.c_int64))),
        *_fields(ctypes.c_void_p, "cache out layer plan"),
    ]


class Question(ctypes.Structure):
    _fields_ = [
        *_fields(ctypes.c_void_p, "query_start seq_lens table"),
        *_fields(ctypes.c_int64, "num_seqs table_width block_size group window is_tree max_rows few_rows range"),
    ]


class Answer(ctypes.Structure):
    _fields_ = _fields(ctypes.c_int64, "num_tasks num_parts part_rows num_scores")


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
    def of(layer: AttentionLayer, block_size: int, is_tiled: bool) -> LayerState:
        struct = LayerStruct(
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_size,
            block_size,
            layer.sliding_window or 0,
            is_tiled,
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


class Planner:
    """Makes plans by the library's function for it."""

    def __init__(self, library: ctypes.CDLL, block_size: int) -> None:
        self._plan = library.plan_attention
        self._plan.argtypes = (ctypes.c_void_p,) * 4
        self._plan.restype = None
        self._block_size = block_size
        self._structs: dict[LayerKind, PlanStruct] = defaultdict(PlanStruct)

    def tasks(self, kind: LayerKind, batch: ForwardBatch, table: Any) -> tuple[Any, Any, Answer]:
        """Members [num_members and more], tasks [num_tasks] and what else is known of them.

        How a sequence is cut depends on its own lengths alone; which of its ranges are read together with others', on
        the blocks.
        """
        starts = np.ascontiguousarray(batch.query_start_np, np.int32)
        lens = np.ascontiguousarray(batch.seq_lens_np, np.int32)
        room = int(starts[-1]) + int(lens.sum()) // RANGE + 2 * len(lens)
        members, tasks = np.empty(room, MEMBER), np.empty(room, TASK)
        group = kind.num_heads // kind.num_kv_heads
        question = Question(
            *(starts.ctypes.data, lens.ctypes.data, table.ctypes.data),
            *(len(lens), table.shape[1], self._block_size, group),
            *(kind.sliding_window or 0, batch.tree_mask is not None, MAX_ROWS, FEW_ROWS, RANGE),
        )
        answer = Answer()
        self._plan(ctypes.addressof(question), members.ctypes.data, tasks.ctypes.data, ctypes.addressof(answer))
        return members, tasks[: answer.num_tasks], answer

    def make(self, kind: LayerKind, batch: ForwardBatch) -> Plan:
        """A plan where the one before for such layers was: recorded steps expect it there."""
        group = batch.kv_groups[kind.kv_group]
        slots = np.ascontiguousarray(group.slot_mapping_np, np.int64)
        table = np.ascontiguousarray(group.block_table_np, np.int32)
        members, tasks, answer = self.tasks(kind, batch, table)
        tree, positions = batch.tree_mask, batch.positions
        if tree is not None:
            tree, positions = tree.contiguous(), positions.contiguous()
        parts: Tensor | None = None
        finished: Any = None
        if answer.num_parts:
            width = -(-kind.head_size // 16) * 16 + 2
            parts = torch.empty(answer.num_parts * kind.num_kv_heads * answer.part_rows * width)
            finished = np.zeros(answer.num_parts * kind.num_kv_heads, np.int32)
        struct = self._structs[kind]
        struct.__init__(
            members.ctypes.data,
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
            answer.part_rows,
        )
        kept = (members, tasks, slots, table, tree, positions, parts, finished)
        return Plan(struct, answer.num_scores * kind.num_kv_heads <= FEW_SCORES, kept)
