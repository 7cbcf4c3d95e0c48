"""Recurrent layers on a CPU by native operators (structures are the same as in recurrent.cpp)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import fwk_native as native
from fwk_native.thread_pool import ThreadPool, operator

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext
    from fwk_models._common.recurrent import CausalConv, RecurrentRows

SOURCE = Path(__file__).with_name("recurrent.cpp")
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
MAX_WIDTH = 8
"""Of a convolution that there is an operator for."""

SMALL = 4096
"""Numbers that one thread computes alone: waking others takes longer."""


def _pointers(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_void_p) for name in names]


def _integers(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int64) for name in names]


class _Sequences(ctypes.Structure):
    _fields_ = [*_pointers("rows", "starts"), *_integers("count")]


class Conv(ctypes.Structure):
    _fields_ = [
        ("sequences", _Sequences),
        *_pointers("x", "before", "after", "out", "state", "kernel", "bias"),
        *_integers("channels", "width", "x_stride", "before_stride", "after_stride", "state_stride", "has_silu"),
    ]


class StateSpace(ctypes.Structure):
    _fields_ = [
        ("sequences", _Sequences),
        *_pointers("x", "b", "c", "step", "out", "state", "rate", "step_bias", "skip"),
        *_integers("heads", "size", "states", "groups", "x_stride", "step_stride", "state_stride", "is_state_short"),
        *((name, ctypes.c_float) for name in ("low", "high")),
    ]


class Selective(ctypes.Structure):
    _fields_ = [
        ("sequences", _Sequences),
        *_pointers("x", "step", "b", "c", "z", "out", "state", "rate", "skip"),
        *_integers("channels", "states", "x_stride", "step_stride", "b_stride", "c_stride", "z_stride"),
        *_integers("state_stride", "is_state_short"),
    ]


class Delta(ctypes.Structure):
    _fields_ = [
        ("sequences", _Sequences),
        *_pointers("mixed", "a", "b", "out", "state", "rate", "step_bias"),
        *_integers("heads", "ratio", "key_size", "value_size"),
        *_integers("mixed_stride", "a_stride", "b_stride", "state_stride", "is_state_short"),
    ]


class GatedNorm(ctypes.Structure):
    _fields_ = [
        *_pointers("x", "z", "out", "weight"),
        *_integers("tokens", "groups", "size", "z_stride", "gates_last"),
        ("eps", ctypes.c_float),
    ]


class Columns(ctypes.Structure):
    _fields_ = [*_pointers("x", "out", "index"), *_integers("rows", "count", "x_stride", "unit")]


class SigmoidGate(ctypes.Structure):
    _fields_ = [
        *_pointers("x", "gate", "out"),
        *_integers("rows", "heads", "size", "x_stride", "gate_stride", "head_stride"),
    ]


class AddGated(ctypes.Structure):
    _fields_ = [*_pointers("x", "gate", "to"), *_integers("rows", "size")]


class RecurrentKernels:
    """The operators of a model's recurrent layers. x and what else is of activations: rows may stand apart."""

    def __init__(self, threads: ThreadPool, dtype: torch.dtype) -> None:
        library, suffix = native.load(SOURCE), DTYPES[dtype]
        self._threads, self._columns = threads, operator(library, "columns")
        self._conv, self._state_space, self._selective, self._delta = (
            operator(library, f"{name}_{suffix}") for name in ("conv", "state_space", "selective", "delta")
        )
        self._gated_norm, self._sigmoid_gate, self._add_gated = (
            operator(library, f"{name}_{suffix}") for name in ("gated_norm", "sigmoid_gate", "add_gated")
        )

    @staticmethod
    def of(context: ModelContext) -> RecurrentKernels | None:
        """Those of a model; None where its small operators are not native, or for another precision."""
        threads = context.operators.context.threads
        is_native = context.operators.graph_capture() is not None and isinstance(threads, ThreadPool)
        known = context.dtype in DTYPES and context.state_dtype in (None, *DTYPES)
        if context.device.type != "cpu" or not is_native or not known:
            return None
        assert isinstance(threads, ThreadPool)
        return RecurrentKernels(threads, context.dtype)

    def conv(
        self,
        conv: CausalConv,
        x: Tensor,
        state: Tensor,
        rows: RecurrentRows,
        *,
        silu: bool = False,
        before: Tensor | None = None,
        after: Tensor | None = None,
    ) -> Tensor:
        """The convolution of x * before, then silu, times ``after``: [num_tokens, channels] each, to the same."""
        x, before, after = _together(x), _together(before), _together(after)
        out = torch.empty(x.shape, dtype=x.dtype)
        args = Conv(
            _sequences(rows),
            *map(_address, (x, before, after, out, state, conv.kernel, conv.bias)),
            *(x.shape[1], conv.width, x.stride(0)),
            *(0 if gate is None else gate.stride(0) for gate in (before, after)),
            *(state.stride(0), silu),
        )
        self._threads.run(self._conv, args, is_small=x.numel() < SMALL)
        return out

    def state_space(
        self, parts: tuple[Tensor, Tensor, Tensor, Tensor], weights: tuple[Tensor, Tensor, Tensor],
        limits: tuple[float, float], state: Tensor, rows: RecurrentRows,
    ) -> Tensor:  # fmt: skip
        """Mamba-2's recurrence with its skip: [num_tokens, heads * size] float32.

        parts: x like that, B and C [num_tokens, groups * states], views of one tensor, and time steps [num_tokens,
        heads]; weights: -exp(A_log), dt_bias and D, [heads] float32 each. state: [num_rows, heads, size, states].
        """
        x, b, c, step = parts
        out = torch.empty(x.shape, dtype=torch.float32)
        _, heads, size, states = state.shape
        args = StateSpace(
            _sequences(rows),
            *map(_address, (x, b, c, step, out, state, *weights)),
            *(heads, size, states, b.shape[1] // states, x.stride(0), step.stride(0), state.stride(0)),
            *(state.dtype == torch.bfloat16, *limits),
        )
        self._threads.run(self._state_space, args)
        return out

    def selective(
        self, parts: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], rate: Tensor, skip: Tensor, state: Tensor,
        rows: RecurrentRows,
    ) -> Tensor:  # fmt: skip
        """Mamba's recurrence with its skip, gated: [num_tokens, channels].

        parts: x, time steps before softplus, B, C and z: [num_tokens, channels] or [num_tokens, states]. rate, state:
        [channels, states], with rows before; skip: [channels]. rate and skip are float32.
        """
        x, step, b, c, z = map(_together, parts)
        out = torch.empty(x.shape, dtype=x.dtype)
        args = Selective(
            _sequences(rows),
            *map(_address, (x, step, b, c, z, out, state, rate, skip)),
            *(*rate.shape, *(part.stride(0) for part in (x, step, b, c, z))),
            *(state.stride(0), state.dtype == torch.bfloat16),
        )
        self._threads.run(self._selective, args)
        return out

    def delta(
        self, mixed: Tensor, a: Tensor, b: Tensor, rate: Tensor, step_bias: Tensor, state: Tensor, rows: RecurrentRows
    ) -> Tensor:
        """The gated delta rule: [num_tokens, heads * value_size] float32.

        mixed: q, k and v of all heads side by side, not yet of length one; a, b: [num_tokens, heads]; rate, step_bias:
        [heads] float32; state: [num_rows, heads, key_size, value_size].
        """
        _, heads, key_size, value_size = state.shape
        num_keys = (mixed.shape[1] - heads * value_size) // (2 * key_size)
        out = torch.empty((mixed.shape[0], heads * value_size), dtype=torch.float32)
        args = Delta(
            _sequences(rows),
            *map(_address, (mixed, a, b, out, state, rate, step_bias)),
            *(num_keys, heads // num_keys, key_size, value_size),
            *(mixed.stride(0), a.stride(0), b.stride(0), state.stride(0), state.dtype == torch.bfloat16),
        )
        self._threads.run(self._delta, args)
        return out

    def gated_norm(self, x: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float, *, gates_last: bool) -> Tensor:
        """The norm of groups of features gated by silu(z), before or after: [num_tokens, size], of z's type.

        x: float32. weight: [size] float32; gates_last: [size / groups] of z's type.
        """
        z = _together(z)
        out = torch.empty(x.shape, dtype=z.dtype)
        args = GatedNorm(
            *map(_address, (x, z, out, weight)),
            *(len(x), groups, x.shape[1] // groups, z.stride(0), gates_last, eps),
        )
        self._threads.run(self._gated_norm, args, is_small=x.numel() < SMALL)
        return out

    def columns(self, x: Tensor, index: Tensor, unit: int) -> Tensor:
        """Columns of x [num_tokens, size], ``unit`` neighbours at once: [num_tokens, len(index) * unit]."""
        x = _together(x)
        out = torch.empty((len(x), len(index) * unit), dtype=x.dtype)
        args = Columns(
            *map(_address, (x, out, index)),
            *(len(x), len(index), x.stride(0) * x.itemsize, unit * x.itemsize),
        )
        self._threads.run(self._columns, args, is_small=out.numel() < SMALL)
        return out

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """x [num_tokens, heads * size] times sigmoid(gate [num_tokens, heads, size])."""
        x, (_, heads, size) = _together(x), gate.shape
        out = torch.empty(x.shape, dtype=x.dtype)
        args = SigmoidGate(
            *map(_address, (x, gate, out)),
            *(len(x), heads, size, x.stride(0), gate.stride(0), gate.stride(1)),
        )
        self._threads.run(self._sigmoid_gate, args, is_small=x.numel() < SMALL)
        return out

    def add_gated(self, to: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        """Add sigmoid(gate [num_tokens, 1]) * x to ``to``, in place: [num_tokens, size] contiguous each."""
        args = AddGated(*map(_address, (x, gate, to)), *x.shape)
        self._threads.run(self._add_gated, args, is_small=x.numel() < SMALL)
        return to


def _sequences(rows: RecurrentRows) -> _Sequences:
    return _Sequences(rows.rows.data_ptr(), rows.starts.data_ptr(), len(rows.rows))


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _together(x: Any) -> Any:
    """Numbers of a row side by side."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()
