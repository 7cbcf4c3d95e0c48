"""Matrices into panels, and numbers into integers, by native operators."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import fwk_native as native
from fwk_native.thread_pool import operator
from fwk_quant._linear_cpu.pages import HugePages

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.native import NativeThreads

SOURCE = Path(__file__).with_name("packing.cpp")

PANEL = 32
"""Outputs that are packed together."""


class _Pack(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("entries", "panels")),
        *((name, ctypes.c_int64) for name in ("rows", "count", "size")),
    ]


class _IntegerWords(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("numbers", "words")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "whole_columns", "bits")),
    ]


class _Quantise(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "numbers", "scales", "zeros")),
        *((name, ctypes.c_int64) for name in ("rows", "groups", "group", "bits", "middle", "is_bfloat16")),
    ]


def as_words(weight: Tensor, multiple: int) -> Tensor:
    """[rows, columns] of 4, 2 or 1 bytes as [rows, words] int32; zeros fill up to a multiple of so many columns."""
    missing = -weight.shape[1] % multiple
    padded = torch.nn.functional.pad(weight, (0, missing)) if missing else weight  # a copy of a head takes memory
    return padded.contiguous().view(torch.int32)


class Packing:
    """What a start does with every matrix, on the threads of ``threads``. Panels lie in huge pages."""

    def __init__(self, threads: NativeThreads, instructions: str | None = None) -> None:
        """instructions: one of ``native.isas()``. Raises ``PluginError`` when the operators cannot be built."""
        self._threads = threads
        self.pages = HugePages()
        library = native.load(SOURCE, instructions)
        self._pack = operator(library, "pack")
        self._integer_words = operator(library, "integer_words")
        self._quantise = operator(library, "quantise")

    def words(self, weight: Tensor, multiple: int) -> Tensor:
        """[rows, columns] of 4, 2 or 1 bytes to words of neighbouring columns, [panels, words, PANEL] int32.

        Zeros fill each row up to a multiple of so many columns, which are whole words, and the rows of the last panel.
        """
        return self.entries(as_words(weight, multiple))

    def entries(self, entries: Tensor) -> Tensor:
        """[rows, entries] of 4, 2 or 1 bytes to [panels, entries, PANEL]; zeros fill the rows of the last panel."""
        panels = self.empty(entries, entries.shape[0])
        self.fill(panels, entries, 0)
        return panels

    def empty(self, entries: Tensor, num_rows: int) -> Tensor:
        """Panels for so many rows of which ``entries`` are some."""
        return self.pages.empty((-(-num_rows // PANEL), entries.shape[1], PANEL), entries.dtype)

    def fill(self, panels: Tensor, entries: Tensor, first: int) -> None:
        """Pack the rows from ``first`` on, with which a panel begins."""
        entries = entries.contiguous()
        rows, count = entries.shape
        to = panels[first // PANEL :].data_ptr()
        self._threads.run(self._pack, _Pack(entries.data_ptr(), to, rows, count, entries.dtype.itemsize))

    def integer_words(self, numbers: Tensor, bits: int, multiple: int) -> Tensor:
        """[rows, columns] uint8 of 4, 5, 6 or 8 bits to [rows, words] int32, in the order of ``Format``'s words.

        Zeros fill each row up to a multiple of so many columns, which are whole steps.
        """
        numbers = numbers.contiguous()
        rows, columns = numbers.shape
        whole = columns + -columns % multiple
        words = torch.empty((rows, whole * bits // 32), dtype=torch.int32)
        call = _IntegerWords(numbers.data_ptr(), words.data_ptr(), rows, columns, whole, bits)
        self._threads.run(self._integer_words, call)
        return words

    def quantise(self, weight: Tensor, bits: int, group_size: int, middle: int | None) -> dict[str, Tensor]:
        """What ``fwk_quant._common.integers.quantise`` computes, to the bit, for finite numbers.

        weight: [rows, columns], bfloat16 or float32. middle: what is added to symmetric numbers; None: groups have
        zeros.
        """
        weight = weight.contiguous()
        rows, groups = weight.shape[0], weight.shape[1] // group_size
        found = {
            "numbers": torch.empty(weight.shape, dtype=torch.int8),
            "scales": torch.empty(rows, groups, dtype=weight.dtype),
        }
        if middle is None:
            found["zeros"] = torch.empty(rows, groups, dtype=torch.uint8)
        call = _Quantise(
            *(weight.data_ptr(), found["numbers"].data_ptr(), found["scales"].data_ptr()),
            None if middle is not None else found["zeros"].data_ptr(),
            *(rows, groups, group_size, bits, middle or 0, weight.dtype == torch.bfloat16),
        )
        self._threads.run(self._quantise, call)
        return found
