"""Launches the kernels: five for each layer, two more where it rounds inputs, whatever the router chose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton

from fwk.errors import ModelLoadError
from fwk.interfaces.moe import ExpertWeights, MoERunner
from fwk_moe.triton_fused import kernels
from fwk_moe.triton_fused.matrices import Matrices
from fwk_tiles.launches import Tile, power_of_two, rounded_inputs
from fwk_tiles.matrices import INT4
from fwk_tiles.numbers import ACTIVATIONS

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.moe import MoEContext

PAIRS_AT_ONCE = 1024
"""Which a program compares with its expert."""

FEW_ROWS, MANY_ROWS = 16, 64
"""Of a tile: as few as tensor cores multiply, and as many as let a program use what it read of a matrix."""

NUMBERS = 1024
"""Of a token's sum in one program: eight for each of 128 threads."""


def tiling(num_pairs: int, num_experts: int, itemsize: int, is_deterministic: bool = False) -> Tile:
    """By how many pairs an expert has on average. A matrix is read once for every tile of its expert.

    is_deterministic: always one size, for matrix units add up tiles of another otherwise.
    """
    # Sums of many rows in float32 do not fit the registers.
    has_few = is_deterministic or itemsize == 4 or num_pairs <= num_experts * FEW_ROWS
    rows = FEW_ROWS if has_few else MANY_ROWS
    return Tile(rows, columns=64, step=128 // itemsize, num_warps=4, num_stages=3)


def gate_up_columns(tile: Tile, form: int, *, is_amd: bool) -> int:
    """Of a program, of each of both matrices. As Triton 3.6 unpacks two of int4 for CUDA, twice as many spill."""
    return tile.columns // 2 if form == INT4.value and tile.rows == FEW_ROWS and not is_amd else tile.columns


class TritonRunner(MoERunner):
    """Sorts, multiplies by gate and up, by down, and adds. Packed weights are unpacked as they are multiplied."""

    def __init__(self, context: MoEContext) -> None:
        super().__init__(context)
        if context.activation not in ACTIVATIONS:
            raise ModelLoadError(
                f"activation {context.activation!r} is not among those the triton MoE runner computes "
                f"({', '.join(ACTIVATIONS)}): take --moe-runner-backend torch"
            )

    def load(self, experts: ExpertWeights) -> None:
        try:
            self._gate_up, self._down = self._read(experts)
        except ModelLoadError as error:
            raise ModelLoadError(f"{error}: take --moe-runner-backend torch") from error

    def _read(self, experts: ExpertWeights) -> tuple[Matrices, Matrices]:
        if experts.is_plain:
            gate_up, down = experts.stacked()
            return Matrices.plain(gate_up), Matrices.plain(down)
        made: list[Matrices] = []
        for expert in range(self.context.num_experts):  # each goes where it stays at once: no second copy of a layer
            parts = experts.packed(expert)
            made = made or [Matrices.like(part, self.context.num_experts) for part in parts]
            for matrices, part in zip(made, parts, strict=True):
                matrices.put(expert, part)
        return made[0], made[1]

    def apply(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        context = self.context
        num_experts, size, inner = context.num_experts, context.hidden_size, context.intermediate_size
        num_tokens, top_k = expert_ids.shape
        out = x.new_empty(num_tokens, size)
        if not num_tokens:
            return out
        x = x if x.stride(1) == 1 else x.contiguous()
        num_pairs = num_tokens * top_k
        tile = tiling(num_pairs, num_experts * context.ep_size, x.element_size(), context.is_deterministic)
        expert_ids = expert_ids.contiguous()
        pairs, tiles = self._sorted(expert_ids, num_pairs, tile.rows)
        shared = {"SIZE": size, "INNER": inner, "ROWS": tile.rows}
        shared |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        gated = x.new_empty(num_pairs, inner)
        activation = ACTIVATIONS[context.activation].value
        columns = gate_up_columns(tile, self._gate_up.constants["FORMAT"], is_amd=torch.version.hip is not None)
        grid = (tiles.shape[0], triton.cdiv(inner, columns))
        x, of_x, step = self._inputs(x, self._gate_up, tile)
        given = (x, x.stride(0), of_x, *self._gate_up.tensors, tiles, pairs, gated)
        chosen = {"TOP_K": top_k, "ACTIVATION": activation, "STEP": step, **self._gate_up.constants}
        _launch(kernels.gate_up_tiles, grid, *given, COLUMNS=columns, **chosen, **shared)
        parts = gated.new_empty(num_pairs, size)
        gated, of_gated, step = self._inputs(gated, self._down, tile)
        grid = (tiles.shape[0], triton.cdiv(size, tile.columns))
        given = (gated, of_gated, *self._down.tensors, tiles, pairs, parts)
        chosen = {"COLUMNS": tile.columns, "STEP": step, **self._down.constants}
        _launch(kernels.down_tiles, grid, *given, **chosen, **shared)
        grid = (num_tokens, triton.cdiv(size, NUMBERS))
        given = (parts, weights.float().contiguous(), expert_ids, out)
        chosen = {"TOP_K": top_k, "EXPERTS": num_experts, "HAS_OTHERS": context.ep_size > 1}
        _launch(kernels.add_experts, grid, *given, SIZE=size, WIDTH=NUMBERS, **chosen)
        return out

    def _inputs(self, x: Tensor, matrices: Matrices, tile: Tile) -> tuple[Tensor, Tensor, int]:
        """x [n, columns] as the kernels read it, scales [n, groups], and how many of a row they read at once."""
        if not matrices.rounds_input:
            return x, x, tile.step
        numbers, scales = rounded_inputs(x, matrices.constants["GROUPS"], matrices.constants["GROUP"], _launch)
        return numbers, scales, tile.step * x.element_size()

    def _sorted(self, expert_ids: Tensor, num_pairs: int, rows: int) -> tuple[Tensor, Tensor]:
        """Pairs [num_pairs] by expert, and tiles of them."""
        num_experts = self.context.num_experts
        max_tiles = min(num_pairs, num_experts) + num_pairs // rows
        made = {"dtype": torch.int32, "device": expert_ids.device}
        counts, pairs = torch.empty(num_experts, **made), torch.empty(num_pairs, **made)
        tiles = torch.empty(max_tiles, kernels.TILE_FIELDS.value, **made)
        width = min(power_of_two(num_pairs), PAIRS_AT_ONCE)
        grid = (num_experts, 1)
        _launch(kernels.count_pairs, grid, expert_ids, counts, num_pairs, WIDTH=width)
        _launch(
            kernels.sort_pairs,
            grid,
            expert_ids,
            counts,
            pairs,
            tiles,
            num_pairs,
            max_tiles,
            EXPERTS=num_experts,
            EXPERTS_WIDTH=power_of_two(num_experts),
            ROWS=rows,
            WIDTH=width,
        )
        return pairs, tiles


def _launch(kernel: Any, grid: tuple[int, int], *arguments: Any, **constants: Any) -> None:
    """Arguments of a kernel are what its decorator makes of them: no type checker knows it."""
    kernel[grid](*arguments, **constants, IS_INTERPRETED=not arguments[0].is_cuda)
