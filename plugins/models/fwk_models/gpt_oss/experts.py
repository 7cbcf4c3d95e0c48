"""Experts of a layer in four tensors, gate and up in turns; the matrices may be MXFP4, which stays as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fwk.errors import ModelLoadError
from fwk.interfaces.loader import WeightSource
from fwk.interfaces.quant import LayerFormat, LayerKind, Quantization
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


class StackedQuantization(Quantization):
    """Asks for an expert's matrix how the tensor is stored that holds all experts'."""

    def __init__(self, quantization: Quantization, prefix: str) -> None:
        self._quantization, self._prefix = quantization, f"{prefix}.experts."

    def choose(self, prefix: str, kind: LayerKind = LayerKind.LINEAR, stored: str | None = None) -> LayerFormat:
        if prefix.startswith(self._prefix):
            is_down = prefix.endswith(".down_proj")
            stored = f"{self._prefix}{'down_proj' if is_down else 'gate_up_proj'}"
        return self._quantization.choose(prefix, kind, stored)


class GptOssExperts(WeightView):
    """Sees ``{prefix}.experts.N.{gate,up,down}_proj.{weight,bias}`` in the tensors that hold all experts of a layer.

    ``raw`` has their ``blocks`` [out_features, in_features / 32, 16] and ``scales`` [out_features, in_features / 32].

    Plain matrices stand as [num_experts, in_features, out_features]; MXFP4 ones as blocks [num_experts, out_features,
    in_features / 32, 16] with scales. Of the out_features of ``gate_up_proj`` the even ones are the gate's.
    """

    def __init__(self, source: WeightSource, prefix: str, num_experts: int, hidden: int, inner: int) -> None:
        """hidden, inner: features of the model, and those between an expert's matrices."""
        super().__init__(source)
        self.prefix, self.num_experts = f"{prefix}.experts.", num_experts
        self._sizes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
        self._kept: dict[str, Tensor] = {}

    def seen(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        if not name.startswith(self.prefix):
            return None
        return self._of_expert(name)

    def raw(self, name: str) -> Tensor:
        return self._of_expert(name) if name.startswith(self.prefix) else self.source.raw(name)

    def _of_expert(self, name: str) -> Tensor:
        number, part, what = name.removeprefix(self.prefix).split(".")
        is_down = part == "down_proj"
        found = self._rows("down_proj" if is_down else "gate_up_proj", what, int(number))
        return found if is_down else found[part == "up_proj" :: 2].contiguous()

    def _rows(self, stored: str, what: str, expert: int) -> Tensor:
        """An expert's bias, blocks or scales, or its matrix as [out_features, in_features]."""
        count, (rows, columns), name = self.num_experts, self._sizes[stored], f"{self.prefix}{stored}"
        if what == "bias":
            return self._tensor(f"{name}_bias", (count, rows))[expert]
        if what == "weight" and not self.source.has(f"{name}_blocks"):
            return self._tensor(name, (count, columns, rows))[expert].t()
        size = (count, rows, columns // BLOCK)
        shapes = {"blocks": (*size, BLOCK // 2), "scales": size}
        if what in shapes:
            return self._packed(f"{name}_{what}", shapes[what])[expert]
        blocks, scales = (self._packed(f"{name}_{part}", shape)[expert] for part, shape in shapes.items())
        return mxfp4_numbers(blocks, scales)

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
