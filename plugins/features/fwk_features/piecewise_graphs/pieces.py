"""Steps with prompts in pieces: what is between two calls of attention is replayed, attention itself is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fwk.interfaces.attention import AttentionBackend, AttentionLayer, BlockFormat, KVSpec, Turn
from fwk.interfaces.graphs import Cut, GraphCapture, NotCapturable
from fwk.types import ForwardBatch
from fwk_features.piecewise_graphs import ENABLE

Meeting = Callable[[Tensor, Tensor, "Tensor | None", AttentionLayer, "Mapping[str, Tensor] | None"], Tensor]
"""Takes the place of a backend's ``forward``."""


class Seam(AttentionBackend):
    """The attention backend as models call it: the run's own, except while a step is captured in pieces."""

    def __init__(self, backend: AttentionBackend) -> None:
        super().__init__(backend.context)
        self.backend = backend
        self.meeting: Meeting | None = None

    def block_format(self, spec: KVSpec) -> BlockFormat:
        return self.backend.block_format(spec)

    def plan(self, batch: ForwardBatch, layers: list[AttentionLayer]) -> Any:
        return self.backend.plan(batch, layers)

    def move(self, layers: list[AttentionLayer], source: Tensor, target: Tensor) -> None:
        self.backend.move(layers, source, target)

    @property
    def turns(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride] - not while pieces meet
        return self.meeting is None and self.backend.turns

    def forward_turned(self, qkv: Tensor, layer: AttentionLayer, batch: ForwardBatch, turn: Turn) -> Tensor:
        return self.backend.forward_turned(qkv, layer, batch, turn)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        extra: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        if self.meeting is not None:
            return self.meeting(q, k, v, layer, extra)
        more = () if extra is None else (extra,)
        return self.backend.forward(q, k, v, layer, batch, *more)


@dataclass(slots=True)
class Call:
    """Attention between two pieces; its tensors are buffers of ``num_tokens`` rows, which other layers use, too."""

    layer: AttentionLayer
    q: Tensor
    k: Tensor
    v: Tensor | None
    out: Tensor


@dataclass(slots=True)
class Captured:
    """One size. ``hidden``: [num_tokens, (1 + number of taps) * width], the first ``width`` of them the model's."""

    replays: list[Callable[[], None]]
    calls: list[Call]
    hidden: Tensor
    width: int


class Pieces:
    """What a model's steps are cut at."""

    label = ENABLE

    def __init__(self, attention: AttentionBackend, sizes: tuple[int, ...]) -> None:
        self.attention = Seam(attention)
        self.sizes = sizes

    def captures(
        self,
        capture: GraphCapture,
        sizes: Sequence[int],
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> PromptPieces:
        """Those of some of the sizes, which are not captured yet."""
        return PromptPieces(capture, self.attention, tuple(sizes), around)


class PromptPieces:
    """Captures of some numbers of tokens.

    A piece ends with copies of q, k and v into buffers that all layers and sizes share, and the next one begins with a
    copy of what attention made of them: else the captures would hold those of every layer for as long as they live.
    Rows of padding are zeros wherever a step is given them: tokens, positions, and the outcome of attention.
    """

    def __init__(
        self,
        capture: GraphCapture,
        seam: Seam,
        sizes: tuple[int, ...],
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """around: what captures are made within."""
        self._capture = capture
        self._seam = seam
        self._sizes = sizes
        self._around = around
        self._buffers: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor] = {}
        self.captured: dict[int, Captured] = {}
        """By number of tokens, padding included."""
        self.refusal = ""
        """Why steps are not replayed; empty if they are."""

    def prepare(
        self, step: Callable[[ForwardBatch], tuple[Tensor, int]], blank: Callable[[int], ForwardBatch]
    ) -> tuple[int, ...]:
        """Capture all sizes; these, or none where it cannot be done.

        step: computes hidden states as ``Captured`` has them, and their width. ``blank`` makes a batch of so many
        tokens, whose numbers mean nothing and whose attention need not be planned.
        """
        with self._around():
            for count in reversed(self._sizes):  # the largest first: the others find room in its memory
                try:
                    self.captured[count] = self._captured(step, blank(count))
                except NotCapturable as reason:
                    self.refusal = str(reason)
                    self.captured.clear()
                    self._buffers.clear()
                    return ()
        return self._sizes

    def _captured(self, step: Callable[[ForwardBatch], tuple[Tensor, int]], batch: ForwardBatch) -> Captured:
        calls: list[Call] = []
        widths: list[int] = []

        def run(cut: Cut | None) -> Tensor:
            calls.clear()
            self._seam.meeting = partial(self._met, calls, cut)
            try:
                hidden, width = step(batch)
            finally:
                self._seam.meeting = None
            widths.append(width)
            return hidden

        replays, hidden = self._capture.capture_pieces(run)
        return Captured(replays, calls, hidden, widths[-1])

    def _met(
        self,
        calls: list[Call],
        cut: Cut | None,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        layer: AttentionLayer,
        extra: Mapping[str, Tensor] | None,
    ) -> Tensor:
        """A model calls attention: a piece ends, unless this is no capture yet (``cut`` is None)."""
        if extra is not None:
            raise NotCapturable("attention reads tensors of its own alongside q, k and v")
        given = (self._kept("q", q), self._kept("k", k), None if v is None else self._kept("v", v))
        out = self._buffer("out", (q.shape[0], layer.num_heads, layer.value_head_size), q)
        calls.append(Call(layer, *given, out))
        if cut is not None:
            cut()
        return out.clone()

    def _kept(self, name: str, values: Tensor) -> Tensor:
        return self._buffer(name, tuple(values.shape), values).copy_(values)

    def _buffer(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        key = name, shape[1:], like.dtype
        if key not in self._buffers:  # before any capture, and for the largest size
            self._buffers[key] = like.new_zeros((self._sizes[-1], *shape[1:]))
        return self._buffers[key][: shape[0]]

    def run(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """The hidden states of a step whose inputs were padded to a captured size, and those with what taps keep.

        Of its own tokens alone: [num_tokens, hidden_size] and [num_tokens, (1 + number of taps) * hidden_size].
        """
        captured = self.captured[batch.piece_tokens]
        for replay, call in zip(captured.replays, captured.calls, strict=False):
            replay()
            self._attend(call, batch)
        captured.replays[-1]()
        hidden = captured.hidden[: batch.num_tokens]
        return hidden[:, : captured.width], hidden

    def _attend(self, call: Call, batch: ForwardBatch) -> None:
        own = slice(batch.num_tokens)
        v = None if call.v is None else call.v[own]
        out = self._seam.backend.forward(call.q[own], call.k[own], v, call.layer, batch)
        out = out.view(-1, *call.out.shape[1:])
        padding = batch.piece_tokens - batch.num_tokens
        if padding:
            torch.cat((out, self._zeros(call.out)[:padding]), out=call.out)
        else:
            call.out.copy_(out)

    def _zeros(self, like: Tensor) -> Tensor:
        return self._buffer("zeros", tuple(like.shape), like)
