"""Experts of a layer in four tensors, gate and up in turns; the matrices may be MXFP4."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fwk.errors import ModelLoadError
from fwk.interfaces.loader import WeightSource
from fwk_models._common.weights import WeightView

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 32
"""Numbers that share a scale (OCP Microscaling Formats 1.0, section 5.2)."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E8M0_BIAS = 127


def mxfp4_numbers(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [..., n, 16] uint8, two numbers a byte, the lower half first; scales [..., n] uint8 -> [..., n * 32]."""
    table = torch.tensor(E2M1, dtype=torch.float32)
    pairs = torch.stack((table[(blocks & 15).long()], table[(blocks >> 4).long()]), -1)
    numbers = pairs.flatten(-2) * torch.exp2(scales.float() - E8M0_BIAS).unsqueeze(-1)
    return numbers.flatten(-2)


class GptOssExperts(WeightView):
    """Sees ``{prefix}.experts.N.{gate,up,down}_proj.{weight,bias}`` in the tensors that hold all experts of a layer.

    Plain matrices stand as [num_experts, in_features, out_features]; MXFP4 ones as blocks [num_experts, out_features,
    in_features / 32, 16] with scales. Of the out_features of ``gate_up_proj`` the even ones are the gate's.
    """

    def __init__(self, source: WeightSource, prefix: str, num_experts: int) -> None:
        super().__init__(source)
        self.prefix, self.num_experts = f"{prefix}.experts.", num_experts
        self._kept: dict[str, Tensor] = {}

    def seen(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        if not name.startswith(self.prefix):
            return None
        number, part, what = name.removeprefix(self.prefix).split(".")
        is_down = part == "down_proj"
        rows = shape[0] * (1 if is_down else 2)
        stored = f"{self.prefix}{'down_proj' if is_down else 'gate_up_proj'}"
        found = self._rows(stored, what, (rows, *shape[1:]), int(number))
        return found if is_down else found[part == "up_proj" :: 2].contiguous()

    def _rows(self, stored: str, what: str, shape: tuple[int, ...], expert: int) -> Tensor:
        """An expert's bias, or its matrix as [out_features, in_features]."""
        count = self.num_experts
        if what == "bias":
            return self._tensor(f"{stored}_bias", (count, *shape))[expert]
        if not self.source.has(f"{stored}_blocks"):
            return self._tensor(stored, (count, *shape[::-1]))[expert].t()
        size = (count, shape[0], shape[1] // BLOCK)
        blocks = self._packed(f"{stored}_blocks", (*size, BLOCK // 2))
        return mxfp4_numbers(blocks[expert], self._packed(f"{stored}_scales", size)[expert])

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Kept until the layer is read: layers ask for one expert after another."""
        if name not in self._kept:
            self._kept[name] = self.source.tensor(name, shape)
        return self._kept[name]

    def _packed(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._kept:
            found = self.source.raw(name)
            if tuple(found.shape) != shape or found.dtype != torch.uint8:
                raise ModelLoadError(
                    f"{name} is {found.dtype} of shape {tuple(found.shape)}, not uint8 of shape {shape}"
                )
            self._kept[name] = found
        return self._kept[name]
