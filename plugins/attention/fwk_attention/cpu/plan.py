"""What all layers of a step share: tasks of the kernel, and its structures (the same as in attention.h)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from fwk.interfaces.attention import AttentionLayer
    from fwk.types import ForwardBatch

MAX_ROWS = 48
"""Rows of a task (query tokens times the query heads of a KV head): a tile of keys is fetched once for all of them, and
their sums and scores stay within a core's cache. The fewer, the fewer keys are computed that its first tokens do not
see."""

MAX_ROWS_8BIT = 96
"""The same where tiles are made of 8-bit numbers first."""

MAX_ROWS_TILES = 192
"""The same where products take blocks of 32 rows, each of which leaves out the keys that it does not see."""

MAX_FEW_ROWS = 48
"""Up to here each range of keys is a task, so that one long sequence keeps all threads busy, and sequences that share
blocks read them together."""

RANGE = 256
"""Keys of such a range. In any task its outcome is computed by itself and joined with those before it: a row has the
same bits in any task."""

LONGEST_VECTOR = 16
"""Floats."""

MAX_FEW_SCORES = 4096
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
        *_fields(ctypes.c_int64, "table_width tree_width num_tasks num_tokens part_rows range"),
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
        *_fields(ctypes.c_void_p, "query_start seq_lens table wanted"),
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
    is_pruned: bool = False

    @staticmethod
    def of(layer: AttentionLayer) -> LayerKind:
        sizes = (layer.num_heads, layer.num_kv_heads, layer.head_size)
        return LayerKind(layer.kv_group, *sizes, layer.sliding_window, layer.is_pruned)

    def wanted(self, batch: ForwardBatch) -> np.ndarray | None:
        """[num_tokens] uint8: the tokens whose outcome is wanted of such layers; None: of all."""
        if not self.is_pruned or batch.hidden_indices is None or len(batch.hidden_indices) == batch.num_tokens:
            return None
        flags = np.zeros(batch.num_tokens, np.uint8)
        flags[batch.hidden_indices.numpy()] = 1
        return flags


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


@dataclass(slots=True)
class Plan:
    """One step for one kind of layer. ``kept`` holds what the structures point at.

    A batch may come again, with the same sequences each a token longer; then only the question is asked again.
    """

    kind: LayerKind
    batch: ForwardBatch
    struct: PlanStruct
    question: Question
    answer: Answer
    members: np.ndarray  # of MEMBER, room for more than there are
    tasks: np.ndarray  # of TASK, likewise
    kept: tuple[Any, ...]
    num_left: int  # times that the batch may come again before there may be too little room
    outcomes: tuple[Any, ...] = ()  # memory of those that are to be merged, and counts of those that are there

    @property
    def is_small(self) -> bool:
        """Whether one thread computes it sooner than the others wake up."""
        return self.answer.num_scores * self.kind.num_kv_heads <= MAX_FEW_SCORES


class Planner:
    """Makes plans by the library's function for it.

    How a sequence is cut depends on its own lengths alone; which of its ranges are read together with others', on the
    blocks.
    """

    def __init__(self, library: ctypes.CDLL, block_size: int, max_rows: int) -> None:
        self._plan = library.plan_attention
        self._plan.argtypes = (ctypes.c_void_p,) * 4
        self._plan.restype = None
        self._block_size = block_size
        self._max_rows = max_rows
        self._plans: dict[LayerKind, Plan] = {}

    def make(self, kind: LayerKind, batch: ForwardBatch) -> Plan:
        """A plan whose structure is where the one before for such layers was: recorded steps expect it there."""
        plan = self._plans.get(kind)
        if plan is None or plan.batch is not batch or not plan.num_left:
            plan = self._plans[kind] = self._new(kind, batch, PlanStruct() if plan is None else plan.struct)
        plan.num_left -= 1
        self._cut(plan)
        return plan

    def _new(self, kind: LayerKind, batch: ForwardBatch, struct: PlanStruct) -> Plan:
        given = batch.kv_groups[kind.kv_group]
        arrays = (batch.query_start_np, batch.seq_lens_np, given.block_table_np)
        starts, lens, table = kept = tuple(np.ascontiguousarray(x, np.int32) for x in arrays)
        slots = np.ascontiguousarray(given.slot_mapping_np, np.int64)
        is_same = slots is given.slot_mapping_np and all(x is y for x, y in zip(kept, arrays, strict=True))
        tree, positions = batch.tree_mask, batch.positions
        if tree is not None:
            tree, positions = tree.contiguous(), positions.contiguous()
        wanted = kind.wanted(batch)
        room = int(starts[-1]) + int(lens.sum()) // RANGE + 3 * len(lens)  # one more for each while it comes again
        members, tasks = np.empty(room, MEMBER), np.empty(room, TASK)
        question = Question(
            *(starts.ctypes.data, lens.ctypes.data, table.ctypes.data),
            None if wanted is None else wanted.ctypes.data,
            *(len(lens), table.shape[1], self._block_size, kind.num_heads // kind.num_kv_heads),
            *(kind.sliding_window or 0, tree is not None, self._max_rows, MAX_FEW_ROWS, RANGE),
        )
        struct.__init__(
            members=members.ctypes.data,
            tasks=tasks.ctypes.data,
            slots=slots.ctypes.data,
            table=table.ctypes.data,
            positions=positions.data_ptr(),
            tree=None if tree is None else tree.data_ptr(),
            parts=None,
            finished=None,
            part_rows=0,
            table_width=table.shape[1],
            tree_width=0 if tree is None else tree.shape[1],
            num_tokens=len(slots),
            range=RANGE,
        )
        left = RANGE if is_same and batch.is_decode else 1
        kept = (*kept, slots, tree, positions, wanted)
        return Plan(kind, batch, struct, question, Answer(), members, tasks, kept, left)

    def _cut(self, plan: Plan) -> None:
        """Ask for the tasks of the lengths as they are now."""
        answer, struct, had = plan.answer, plan.struct, (plan.answer.num_parts, plan.answer.part_rows)
        self._plan(ctypes.addressof(plan.question), struct.members, struct.tasks, ctypes.addressof(answer))
        struct.num_tasks = answer.num_tasks
        if had == (answer.num_parts, answer.part_rows):
            return
        places = answer.num_parts * plan.kind.num_kv_heads
        width = -(-plan.kind.head_size // 16) * 16 + LONGEST_VECTOR + 1
        parts, finished = torch.empty(places * answer.part_rows * width), np.zeros(places, np.int32)
        plan.outcomes = (parts, finished)
        struct.parts, struct.finished, struct.part_rows = parts.data_ptr(), finished.ctypes.data, answer.part_rows
