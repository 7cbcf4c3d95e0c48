"""Launches the kernels: two for a step's picks, one for its grammars' masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton

from fwk.interfaces.sampling import Sampler, SamplingContext, SamplingRows
from fwk_sampling._common.settings import SETTINGS, SlotSettings
from fwk_sampling._common.unchanged import Unchanged
from fwk_sampling._common.uniform import draws_of
from fwk_sampling.triton_sampler import kernels

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import SamplingParams

CHUNK = 4096
"""Entries that a program of a chunk reads at once: eight for each of 512 threads."""

AT_ONCE = 2048
"""Those of a program of a row, which counts in 64 bits: more would not fit the registers."""

NUM_WARPS = 16


class TritonSampler(Sampler):
    """The most likely token of greedy rows (of equals the first); one drawn by inverse CDF for the others.

    It does the work of the processors ``temperature`` and ``truncation`` itself, by their rules, for rows that say so.
    A pick is the torch sampler's on a device, from the same integers, as far as both take the same exponential: where
    they round it differently in the last bit, a draw or a nucleus' end within 2**-22 of a border falls on either side.
    """

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        self._settings = SlotSettings(context)
        self._masked = Unchanged(context.send)

    def add(self, slot: int, params: SamplingParams) -> None:
        self._settings.add(slot, params)

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        num_rows, vocab_size = logits.shape
        picked = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        num_chunks = triton.cdiv(vocab_size, CHUNK)
        made: dict[str, Any] = {"device": logits.device}
        tops = torch.empty(num_rows, num_chunks, dtype=torch.float32, **made)
        places = torch.empty(num_rows, num_chunks, dtype=torch.int32, **made)
        samples = not rows.all_greedy
        settings = self.context.send(_table(self._settings.of(rows))) if samples else tops
        if samples and rows.num_fewer is not None:
            settings[:, 0] = draws_of(rows, self.context.send)
        scaled = torch.empty(num_rows, vocab_size, dtype=torch.float32, **made) if samples else tops
        shared: dict[str, Any] = {"SAMPLES": samples, "num_warps": NUM_WARPS}
        given = (logits, logits.stride(0), settings, scaled, tops, places, vocab_size)
        _launch(kernels.chunk_tops, (num_rows, num_chunks), *given, WIDTH=CHUNK, **shared)
        given = (settings, scaled, tops, places, picked, vocab_size, num_chunks)
        _launch(
            kernels.pick_rows, (num_rows, 1), *given, CHUNKS=triton.next_power_of_2(num_chunks), WIDTH=AT_ONCE, **shared
        )
        return picked

    def mask(self, logits: Tensor, rows: np.ndarray, masks: np.ndarray) -> None:
        if logits.stride(1) != 1:
            super().mask(logits, rows, masks)
            return
        grid = (len(rows), triton.cdiv(logits.shape[1], CHUNK))
        given = (self._masked.send(rows), self.context.send(masks), logits.shape[1], masks.shape[1])
        _launch(kernels.mask_rows, grid, logits, logits.stride(0), *given, WIDTH=CHUNK, num_warps=NUM_WARPS)


def _table(settings: np.ndarray) -> np.ndarray:
    """[num_rows, fields] float64: one array to send."""
    table = np.empty((len(settings), len(SETTINGS.names or ())), np.float64)
    for column, name in enumerate(SETTINGS.names or ()):
        table[:, column] = settings[name]
    return table


def _launch(kernel: Any, grid: tuple[int, int], *arguments: Any, **constants: Any) -> None:
    """Arguments of a kernel are what its decorator makes of them: no type checker knows it."""
    if all(grid):
        kernel[grid](*arguments, **constants)
