"""The matrices of all experts, in one form, as the kernels read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fwk.errors import ModelLoadError
from fwk.interfaces.quant import PackedNumbers
from fwk_tiles.launches import form_of
from fwk_tiles.matrices import FORMATS, PLAIN

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Matrices:
    """numbers: [num_experts, rows, columns], packed along the columns as ``PackedNumbers`` says; so scales and zeros.

    Without scales or zeros, the kernel is given the numbers for them, and reads neither.
    """

    numbers: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    constants: dict[str, Any]
    rounds_input: bool = False

    @staticmethod
    def plain(numbers: Tensor) -> Matrices:
        return Matrices(numbers, None, None, {**form_of(PLAIN.value, 1, 1, 1, has_zeros=False), "ROUNDS": False})

    @staticmethod
    def like(one: PackedNumbers, num_experts: int) -> Matrices:
        """Room for so many. Raises ``ModelLoadError`` for a form that the kernels do not unpack."""
        if one.kind not in FORMATS:
            raise ModelLoadError(f"this MoE runner unpacks {', '.join(FORMATS)}, not {one.kind}")

        def room(x: Tensor) -> Tensor:
            return torch.empty(num_experts, *x.shape, dtype=x.dtype, device=x.device)

        groups, zeros = one.scales.shape[1], None if one.zeros is None else room(one.zeros)
        form = form_of(FORMATS[one.kind].value, groups, one.group_size, one.row_block, has_zeros=zeros is not None)
        constants = {**form, "ROUNDS": one.rounds_input}
        return Matrices(room(_bytes(one.numbers)), room(one.scales), zeros, constants, one.rounds_input)

    def put(self, expert: int, one: PackedNumbers) -> None:
        """Copy the matrix of an expert to its place. Raises ``ModelLoadError`` where it is not of the others' form."""
        given = (_bytes(one.numbers), one.scales, one.zeros)
        for room, x in zip((self.numbers, self.scales, self.zeros), given, strict=True):
            if (room is None) != (x is None) or (room is not None and x is not None and room.shape[1:] != x.shape):
                raise ModelLoadError(f"expert {expert} is packed in another form than expert 0")
            if one.rounds_input != self.rounds_input:
                raise ModelLoadError(f"inputs of expert {expert} are not rounded as those of expert 0 are")
            if room is not None and x is not None:
                room[expert].copy_(x)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        scales = self.numbers if self.scales is None else self.scales
        return self.numbers, scales, scales if self.zeros is None else self.zeros


def _bytes(numbers: Tensor) -> Tensor:
    """As uint8: not every device that Triton compiles for reads e4m3."""
    return numbers.view(torch.uint8)
