"""Products with weights in NVFP4 or MXFP4. Activations are kept; the native kernel of a CPU rounds them to 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from fwk.errors import ModelLoadError
from fwk.interfaces.native import NativeLinear
from fwk.interfaces.quant import LinearShape, ParamSpec, QuantContext, QuantMethod
from fwk.interfaces.weights_cache import PackedTensors
from fwk_quant._common.activations import integer_kernel
from fwk_quant._common.product import multiply
from fwk_quant._linear_cpu.integers import rounded_together
from fwk_quant._linear_cpu.kernel import PackedMatrix
from fwk_quant._linear_cpu.packed import from_packed, layout_version, to_packed
from fwk_quant.fp4.numbers import MXFP4_BLOCK, NVFP4_BLOCK, Fp4Matrix, is_damaged, rounded

if TYPE_CHECKING:
    from torch import Tensor


class Fp4Method(QuantMethod):
    """By the native kernel, or else rows are unpacked a chunk at a time, for each product anew."""

    def __init__(self, context: QuantContext) -> None:
        super().__init__(context)
        self._kernel = integer_kernel(context, context.options.fp4_activations, "--fp4-activations")

    def params(self, shape: LinearShape) -> Mapping[str, ParamSpec]:
        one = ParamSpec(None, None, torch.float32)
        unread = ParamSpec(None, None, torch.float32, is_optional=True)  # activations are not rounded to four bits
        packed = ParamSpec(0, 1, torch.uint8, input_block=2)
        if shape.layout == "mxfp4":
            blocks = ParamSpec(0, 1, torch.uint8, input_block=MXFP4_BLOCK, trailing=(MXFP4_BLOCK // 2,))
            return {"blocks": blocks, "scales": ParamSpec(0, 1, torch.uint8, input_block=MXFP4_BLOCK)}
        if shape.layout == "compressed-tensors:mxfp4-pack-quantized":
            scales = ParamSpec(0, 1, torch.uint8, input_block=MXFP4_BLOCK)
            return {"weight_packed": packed, "weight_scale": scales, "input_global_scale": unread}
        scales = ParamSpec(0, 1, torch.float8_e4m3fn, input_block=NVFP4_BLOCK)
        if shape.layout == "compressed-tensors:nvfp4-pack-quantized":
            return {
                "weight_packed": packed,
                "weight_scale": scales,
                "weight_global_scale": one,
                "input_global_scale": unread,
            }
        return {"weight": packed, "weight_scale": scales, "weight_scale_2": one, "input_scale": unread}

    def encode(self, weight: Tensor, prefix: str) -> Mapping[str, Tensor]:
        if weight.shape[1] % NVFP4_BLOCK:
            raise ModelLoadError(
                f"{prefix}: blocks of {NVFP4_BLOCK} do not divide its {weight.shape[1]} inputs; leave the layer out "
                "with --quantization-exclude"
            )
        return rounded(weight)

    def finish(self, loaded: Mapping[str, Tensor], shape: LinearShape) -> Fp4Matrix | PackedMatrix:
        """Raises ``ModelLoadError`` when a scale is not a finite number."""
        if shape.layout == "mxfp4":
            packed, scales = loaded["blocks"].flatten(1), loaded["scales"]
        else:
            packed, scales = loaded["weight_packed" if "weight_packed" in loaded else "weight"], loaded["weight_scale"]
        matrix = Fp4Matrix(packed, scales, _factors(loaded, shape))
        if is_damaged(matrix):
            raise ModelLoadError(f"{shape.prefix}: a scale is infinite or not a number: fetch the file again")
        rows, columns = matrix.size
        if self._kernel is None:
            return matrix
        slices = matrix.for_kernel()
        form = slices(0, min(1, rows))
        if rounded_together(form.bits, columns, form.group) is None:
            raise ModelLoadError(
                f"{shape.prefix}: the native kernel does not compute {columns} inputs in blocks of {form.group}: leave "
                "the layer out (--quantization-exclude), or say --fp4-activations full"
            )
        return self._kernel.pack_slices(rows, columns, slices)

    def apply(self, weights: Fp4Matrix | PackedMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(weights, PackedMatrix):
            assert self._kernel is not None
            return self._kernel.apply(weights, x, bias)
        return multiply(x, weights.size, lambda start, stop: weights.dense(start, stop, x.dtype), bias)

    @property
    def packed_version(self) -> str | None:
        return None if self._kernel is None else f"{layout_version()} fp4"

    def to_packed(self, weights: Fp4Matrix | PackedMatrix) -> PackedTensors | None:
        return to_packed([weights]) if isinstance(weights, PackedMatrix) else None

    def from_packed(self, packed: PackedTensors) -> PackedMatrix:
        return from_packed(packed)[0]

    def native(self, weights: Fp4Matrix | PackedMatrix, num_slices: int) -> list[NativeLinear] | None:
        if self._kernel is None or not isinstance(weights, PackedMatrix):
            return None
        return self._kernel.slices(weights, num_slices)


def _factors(loaded: Mapping[str, Tensor], shape: LinearShape) -> Tensor:
    """[rows] float32: of each part its own. compressed-tensors stores what the scales were multiplied with."""
    stored, is_divisor = loaded.get("weight_scale_2"), False
    if stored is None:
        stored, is_divisor = loaded.get("weight_global_scale"), True
    if stored is None:
        return torch.ones(sum(shape.out_features), device=shape.device)
    of_parts = stored.reshape(-1).reciprocal() if is_divisor else stored.reshape(-1)
    return of_parts.repeat_interleave(torch.tensor(shape.out_features, device=of_parts.device))
