"""Settings by slot, and the call of the kernel."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import fwk_native as native
from fwk.interfaces.sampling import Sampler, SamplingContext, SamplingRows
from fwk.types import SamplingParams
from fwk_native.thread_pool import operator
from fwk_sampling._common.settings import SlotSettings

SOURCE = Path(__file__).with_name("sampler.cpp")

MAX_FEW_LOGITS = 65_536
"""Up to so many one thread works alone: waking others takes longer."""


class SampleStruct(ctypes.Structure):
    _fields_ = [
        ("logits", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("stride", "vocab_size", "num_rows")),
        ("settings", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
    ]


class MaskStruct(ctypes.Structure):
    _fields_ = [
        ("logits", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("stride", "vocab_size", "num_masks")),
        ("rows", ctypes.c_void_p),
        ("masks", ctypes.c_void_p),
    ]


@dataclass(frozen=True, slots=True)
class _Greedy:
    """The latest call for the most likely tokens of a tensor of logits."""

    logits: Callable[[], Tensor | None]  # weak: what is not replayed is not kept
    tokens: Tensor
    call: SampleStruct


class CpuSampler(Sampler):
    """The most likely token of greedy rows (of equals the first); one drawn by inverse CDF for the others.

    It does the work of the processors ``temperature`` and ``truncation`` itself, by their rules, for rows that say so.
    """

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        library = native.load(SOURCE)
        names = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
        self._operators = {dtype: operator(library, f"sample_{name}") for dtype, name in names.items()}
        self._masks = {dtype: operator(library, f"mask_{name}") for dtype, name in names.items()}
        self._settings = SlotSettings(context)
        self._greedy: _Greedy | None = None

    def add(self, slot: int, params: SamplingParams) -> None:
        self._settings.add(slot, params)

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        if rows.all_greedy:
            return self._most_likely(logits)
        logits = self._readable(logits)
        settings = self._settings.of(rows)  # as in ``Settings`` of sampler.cpp
        tokens = torch.empty(len(logits), dtype=torch.int64)
        self._run(logits, self._call(logits, settings.ctypes.data, tokens))
        return tokens

    def mask(self, logits: Tensor, rows: np.ndarray, masks: np.ndarray) -> None:
        if logits.dtype not in self._masks or logits.stride(1) != 1:
            super().mask(logits, rows, masks)
            return
        size = logits.shape[1]
        call = MaskStruct(logits.data_ptr(), logits.stride(0), size, len(rows), rows.ctypes.data, masks.ctypes.data)
        self.context.threads.run(self._masks[logits.dtype], call, is_small=len(rows) * size <= MAX_FEW_LOGITS)

    def _most_likely(self, logits: Tensor) -> Tensor:
        """Of every row. Steps that are replayed come with the same logits: then all is there from the step before."""
        last = self._greedy
        if last is None or last.logits() is not logits:
            given, logits = logits, self._readable(logits)
            tokens = torch.empty(len(logits), dtype=torch.int64)
            last = _Greedy(weakref.ref(given), tokens, self._call(logits, None, tokens))
            self._greedy = last if logits is given else None  # a copy would not have the next step's numbers
        self._run(logits, last.call)
        return last.tokens

    def _readable(self, logits: Tensor) -> Tensor:
        """The logits, or a copy that the kernel can read."""
        logits = logits if logits.dtype in self._operators else logits.float()
        return logits if logits.stride(1) == 1 else logits.contiguous()

    def _call(self, logits: Tensor, settings: int | None, tokens: Tensor) -> SampleStruct:
        count, size = logits.shape
        return SampleStruct(logits.data_ptr(), logits.stride(0), size, count, settings, tokens.data_ptr())

    def _run(self, logits: Tensor, call: SampleStruct) -> None:
        is_small = call.num_rows == 1 or call.num_rows * call.vocab_size <= MAX_FEW_LOGITS
        self.context.threads.run(self._operators[logits.dtype], call, is_small=is_small)
