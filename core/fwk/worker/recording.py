"""Record a step on a CPU: the calls of native operators, in memory that stays where it is."""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fwk.team import Tape, Team
from fwk.worker.graphs import Captured, Graph, GraphCapture, StepOutput

ALIGNMENT = 64

_ALLOCATIONS = frozenset(
    (
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
    )
)


class Arena:
    """Memory of recorded steps. All tapes share it: what a step made is used up before the next step runs.

    A piece is free again when the last tensor on it is gone, and the next operator may get it: in a replay, operators
    run in the same order.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[ctypes.Array[ctypes.c_char]]] = defaultdict(list)
        self.num_bytes = 0

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor on a piece of its own."""
        size = shape.numel() * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype)
        # Powers of two: pieces serve steps of many sizes, and all together take twice what the largest step takes.
        room = 1 << (size + ALIGNMENT - 1).bit_length()
        pieces = self._free[room]
        if pieces:
            piece = pieces.pop()
        else:
            piece = (ctypes.c_char * room)()
            self.num_bytes += room
        lease = (ctypes.c_char * size).from_buffer(piece, -ctypes.addressof(piece) % ALIGNMENT)
        weakref.finalize(lease, pieces.append, piece)
        return torch.frombuffer(lease, dtype=dtype).view(shape)


class TapeGraph(Graph):
    """A tape, and where its outcome lies."""

    def __init__(self, team: Team, tape: Tape, output: StepOutput) -> None:
        self._team, self._tape = team, tape
        self._hidden, self._logits = (None if x is None else _view(x) for x in output)

    def replay(self) -> StepOutput:
        self._team.replay(self._tape)
        assert self._hidden is not None
        return self._hidden, self._logits


class TapeCapture(GraphCapture):
    """Runs a step under watch: native operators go on a tape, and what torch itself computes makes it worthless."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self.arena = Arena()

    def capture(self, step: Callable[[], StepOutput]) -> Captured:
        tape, watch = Tape(), _Watch(self.arena)
        with _recording(self._team, tape), watch:
            output = step()
        if watch.computed:
            return Captured(output, None, f"torch computes {watch.computed}, which a recorded step cannot hold")
        return Captured(output, TapeGraph(self._team, tape, output))


@contextmanager
def _recording(team: Team, tape: Tape) -> Iterator[None]:
    team.tape = tape
    try:
        yield
    finally:
        team.tape = None


class _Watch(TorchDispatchMode):
    """Sees every torch operator: gives allocations memory of the arena, and names the first that computes."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena
        self.computed = ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; torch's own answer imports its compiler for the first operator: 130 MB, seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS and out.device.type == "cpu" and out.is_contiguous():
            return self._arena.empty(out.shape, out.dtype)
        if not self.computed and not _is_view(func, args, out):
            self.computed = str(func)
        return out


def _is_view(func: Any, args: Any, out: Any) -> bool:
    """Whether an operator only looks at its arguments' memory in another way."""
    given = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if isinstance(x, Tensor)}
    made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
    return bool(made) and not func._schema.is_mutable and all(x.untyped_storage().data_ptr() in given for x in made)


def _view(x: Tensor) -> Tensor:
    """The same memory without holding on to it: the arena keeps it, and others may use it between steps."""
    raw = (ctypes.c_char * (x.numel() * x.element_size())).from_address(x.data_ptr())
    return torch.frombuffer(raw, dtype=x.dtype).view(x.shape)
