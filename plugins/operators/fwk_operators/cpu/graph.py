"""Record a step on a CPU: the calls of native operators, in memory that stays where it is, for any number of tokens.

A step is recorded at six sizes, without being computed. The calls must be the same ones; the words of their arguments
that differ say which of them count tokens, hidden states, logits or sequences, and are set anew before a step of
another size.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fwk.interfaces.graphs import Graph, GraphCapture, NotCapturable, StepOutput, StepSize
from fwk_native import huge_pages
from fwk_native.thread_pool import Tape, ThreadPool

ALIGNMENT = 64

RESERVED = 64 << 20
"""Bytes that an arena reserves at once; they take no memory before they are written to."""

MIN_RECORDED = 8
"""Tokens, hidden states or logits of the recordings compared with the largest: few, yet nobody's special case."""

SMALLER_SIZES: tuple[dict[str, int], ...] = (
    *({count: MIN_RECORDED} for count in ("num_tokens", "num_hidden", "num_logits")),
    {"num_seqs": 1},
)

MAX_EACH = 1 << 16
"""What an argument may grow by with a token, a logit or a sequence. Addresses that differ by chance do by more."""

_ALLOCATIONS = frozenset(
    (
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
    )
)


class Arena:
    """Memory of a recorded step, laid out for its largest size.

    A piece is free again when the last tensor on it is gone, and the next operator may get it: in a replay, operators
    run in the same order. What is allocated by the recordings after the first, lies where it lay in the first.
    """

    def __init__(self) -> None:
        self._reserved: list[Tensor] = []
        self._end = self._left = 0
        self._free: list[tuple[int, int]] = []  # bytes and address of each piece
        self._places: list[tuple[int, int]] = []  # bytes and address of each allocation of the first recording
        self._next: int | None = None  # of the places, in recordings after the first
        self.num_bytes = 0

    def begin_again(self) -> None:
        """Another recording of the same step begins."""
        self._next = 0

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor on a piece of its own. Raises ``NotCapturable`` if the recordings do not agree about it."""
        size = shape.numel() * dtype.itemsize
        address = self._take(size) if self._next is None else self._find(size)
        if not size:
            return torch.empty(shape, dtype=dtype)
        lease = (ctypes.c_char * size).from_address(address)
        if self._next is None:
            weakref.finalize(lease, self._free.append, self._places[-1])
        return torch.frombuffer(lease, dtype=dtype).view(shape)

    def _take(self, size: int) -> int:
        room = max(-(-size // ALIGNMENT) * ALIGNMENT, ALIGNMENT)
        fitting = [piece for piece in self._free if room <= piece[0] <= 2 * room]
        if fitting:
            piece = min(fitting)
            self._free.remove(piece)
        else:
            piece = (room, self._new(room))
        self._places.append(piece)
        return piece[1]

    def _new(self, room: int) -> int:
        if room > self._left:
            memory = huge_pages.zeros(max(room, RESERVED))
            self._reserved.append(memory)
            self._end, self._left = memory.data_ptr(), memory.numel()
        address = self._end
        self._end += room
        self._left -= room
        self.num_bytes += room
        return address

    def _find(self, size: int) -> int:
        assert self._next is not None
        place = self._places[self._next] if self._next < len(self._places) else (-1, 0)
        if size > place[0]:
            raise NotCapturable("the memory of a step depends on its size in another way than by tokens")
        self._next += 1
        return place[1]


class TapeGraph(Graph):
    """A tape, the words of its arguments that depend on the size, and where its outcome lies."""

    def __init__(
        self, threads: ThreadPool, arena: Arena, recorded: list[tuple[StepSize, Tape]], output: StepOutput
    ) -> None:
        self._threads, self.arena = threads, arena
        self._recorded = recorded[0][1]  # whose arguments may hold what they point at
        self.tape, words = _copied(self._recorded)
        self._words = words
        self._places, self._base, self._each = _growing(recorded)
        self._output = output
        self._size, self._views = recorded[0][0], output

    def replay(self, size: StepSize) -> StepOutput:
        if size != self._size:
            self._words[self._places] = self._base + self._each @ np.array(size)
            hidden, logits = self._output
            assert logits is not None
            self._views = hidden[: size.num_hidden], logits[: size.num_logits] if size.num_logits else None
            self._size = size
        self._threads.replay(self.tape)
        return self._views


class TapeCapture(GraphCapture):
    """Runs a step under watch: native operators go on a tape, and what torch itself computes makes it worthless."""

    def __init__(self, threads: ThreadPool) -> None:
        self._threads = threads

    def capture(self, step: Callable[[StepSize], StepOutput], most: StepSize) -> TapeGraph:
        largest = StepSize(*(max(count, 2 * MIN_RECORDED) for count in most[:3]), num_seqs=2)
        arena = Arena()
        tape, output = self._record(step, largest, arena)
        recorded = [(largest, tape)]
        between = StepSize(MIN_RECORDED + 3, MIN_RECORDED + 2, MIN_RECORDED + 1, num_seqs=1)
        for size in (*(largest._replace(**fewer) for fewer in SMALLER_SIZES), between):
            arena.begin_again()
            recorded.append((size, self._record(step, size, arena)[0]))
        return TapeGraph(self._threads, arena, recorded, output)

    def _record(self, step: Callable[[StepSize], StepOutput], size: StepSize, arena: Arena) -> tuple[Tape, StepOutput]:
        tape = Tape()
        with _recording(self._threads, tape), _Watch(arena):
            return tape, step(size)


@contextmanager
def _recording(threads: ThreadPool, tape: Tape) -> Iterator[None]:
    threads.tape = tape
    try:
        yield
    finally:
        threads.tape = None


class _Watch(TorchDispatchMode):
    """Sees every torch operator: gives allocations memory of the arena, and stops at the first that computes."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; torch's own answer imports its compiler for the first operator: 130 MB, seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS and out.device.type == "cpu" and out.is_contiguous():
            return self._arena.empty(out.shape, out.dtype)
        if not _is_view(func, args, out):
            raise NotCapturable(f"torch computes {func}, which a recorded step cannot hold")
        return out


def _is_view(func: Any, args: Any, out: Any) -> bool:
    """Whether an operator only looks at its first argument's memory in another way."""
    if not args or not isinstance(args[0], Tensor) or func._schema.is_mutable:
        return False
    given = args[0].untyped_storage().data_ptr()
    made = out if isinstance(out, list | tuple) else (out,)
    return all(isinstance(x, Tensor) and x.untyped_storage().data_ptr() == given for x in made)


def _words_of(tape: Tape) -> np.ndarray:
    """All arguments of a tape in a row, as int64."""
    raw = b"".join(bytes(args) + bytes(-ctypes.sizeof(args) % 8) for _, args in tape.calls)
    return np.frombuffer(raw, np.int64).copy()


def _copied(tape: Tape) -> tuple[Tape, np.ndarray]:
    """The same calls, and the words in which all their arguments lie."""
    words, copy, start = _words_of(tape), Tape(), 0
    for op, args in tape.calls:
        copy.append(op, type(args).from_buffer(words.data, start))
        start += -(-ctypes.sizeof(args) // 8) * 8
    return copy, words


def _growing(recorded: list[tuple[StepSize, Tape]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The places [n] of words that depend on the size, what they are where all counts are 0 [n], and what one more of
    each count adds to them [n, counts].

    recorded: at the largest size, with fewer of each count in turn, and at one more size, to see that it is so. Raises
    ``NotCapturable`` where that is not how they depend on it.
    """
    (most, first), *others = recorded
    kinds = [(op, type(args)) for op, args in first.calls]
    if any(kinds != [(op, type(args)) for op, args in tape.calls] for _, tape in others):
        raise NotCapturable("its operators are others for few tokens than for many")
    words = _words_of(first)
    *ones, (size, other) = others
    changes = np.stack([words - _words_of(tape) for _, tape in ones], -1)
    spans = np.array(most) - np.array([fewer[i] for i, (fewer, _) in enumerate(ones)])
    each, rest = np.divmod(changes, spans)
    is_other = words - each @ (np.array(most) - np.array(size)) != _words_of(other)
    wrong = np.flatnonzero(((rest != 0) | (each < 0) | (each > MAX_EACH)).any(-1) | is_other)
    if len(wrong):
        raise NotCapturable(f"an argument of {_owner(first, int(wrong[0]))} does not grow with the step's size")
    places = np.flatnonzero(changes.any(-1))
    return places, words[places] - each[places] @ np.array(most), each[places]


def _owner(tape: Tape, place: int) -> str:
    """The name of the structure in which a word lies."""
    for _, args in tape.calls:
        place -= -(-ctypes.sizeof(args) // 8)
        if place < 0:
            return type(args).__name__
    raise IndexError(place)
