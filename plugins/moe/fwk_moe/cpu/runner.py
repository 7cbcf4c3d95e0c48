"""Hand a layer's packed experts to one operator (structures are the same as in experts.cpp)."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

import fwk_native as native
from fwk.errors import ModelLoadError
from fwk.interfaces.moe import ExpertWeights, MoEContext, MoERunner
from fwk_moe._common.loop import LayerLoop
from fwk_native.thread_pool import operator

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.native import NativeLinear

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("experts.cpp")
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu": 2, "clamped_swiglu": 3}

MIN_SLICES = 4
"""Parts of an expert's matrix at least, where it is large enough."""

SLICES_A_THREAD = 4
"""Parts that a step of one token has for each thread at least, of all its experts: so that they end together."""


class Slice(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("op", "matrix", "bias")),
        *((name, ctypes.c_int64) for name in ("first", "row_bytes")),
    ]


class Experts(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "out", "ids", "weights", "gate_up", "down", "scratch")),
        *((name, ctypes.c_int64) for name in ("tokens", "x_stride", "top_k", "num_experts", "num_gate_up")),
        *((name, ctypes.c_int64) for name in ("num_down", "hidden", "inner", "activation")),
    ]


class CpuRunner(MoERunner):
    """One operator for all experts of a layer; a step reads those that its tokens chose."""

    names: ClassVar = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

    def __init__(self, context: MoEContext) -> None:
        super().__init__(context)
        if context.activation not in ACTIVATIONS:
            raise ModelLoadError(
                f"activation {context.activation!r} is not among those the cpu MoE runner computes "
                f"({', '.join(ACTIVATIONS)}): take --moe-runner-backend torch"
            )
        library, name = native.load(SOURCE), self.names[context.dtype]
        self._operator = operator(library, f"experts_{name}")
        for sized in (library.expert_bytes, getattr(library, f"pair_bytes_{name}")):
            sized.restype = ctypes.c_int64
        self._expert_bytes = library.expert_bytes(ctypes.c_int64(context.num_experts))
        sizes = (ctypes.c_int64(context.hidden_size), ctypes.c_int64(context.intermediate_size))
        self._pair_bytes = getattr(library, f"pair_bytes_{name}")(*sizes)

    def load(self, experts: ExpertWeights) -> None:
        context = self.context
        num_active = max(context.top_k // context.ep_size, 1)  # of a token, on average
        count = max(MIN_SLICES, -(-SLICES_A_THREAD * context.threads.size // num_active))
        layers = [experts.layers(index) for index in range(context.num_experts)]
        gate_up, down = ([experts.native(pair[i], count) for pair in layers] for i in range(2))
        self._kept: list[Any] = [layers]
        self._others: LayerLoop | None = None
        if any(slices is None for slices in (*gate_up, *down)):
            logger.warning("experts run one after another, more slowly: their weight format has no native kernel")
            self._others = LayerLoop(context, layers)
            return
        self._gate_up, self._num_gate_up = self._table([x for x in gate_up if x is not None])
        self._down, self._num_down = self._table([x for x in down if x is not None])

    def _table(self, layers: list[list[NativeLinear]]) -> tuple[int, int]:
        """The address of [num_experts, slices] structures, and how many slices."""
        count = max(len(slices) for slices in layers)
        table = (Slice * (len(layers) * count))()
        for i, slices in enumerate(layers):
            for j, part in enumerate(slices):
                bias = None if part.bias is None else part.bias.data_ptr()
                table[i * count + j] = Slice(part.operator, part.matrix, bias, part.first, part.row_bytes)
        self._kept += [table, layers]
        return ctypes.addressof(table), count

    def apply(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        if self._others is not None:
            return self._others.apply(x, expert_ids, weights)
        context = self.context
        x = x if x.stride(1) == 1 else x.contiguous()
        expert_ids, weights = expert_ids.contiguous(), weights.contiguous()
        tokens, top_k = expert_ids.shape
        out = torch.empty(x.shape, dtype=x.dtype)
        scratch = torch.empty(self._expert_bytes + tokens * top_k * self._pair_bytes, dtype=torch.uint8)
        args = Experts(
            *(x.data_ptr(), out.data_ptr(), expert_ids.data_ptr(), weights.data_ptr()),
            *(self._gate_up, self._down, scratch.data_ptr()),
            *(tokens, x.stride(0), top_k, context.num_experts, self._num_gate_up, self._num_down),
            *(context.hidden_size, context.intermediate_size, ACTIVATIONS[context.activation]),
        )
        context.threads.run(self._operator, args)
        return out
