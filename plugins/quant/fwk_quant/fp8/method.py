"""e4m3 weights: ``value = number * scale``, with a scale per output feature, per matrix or per block of 128 x 128.

Activations are kept, or rounded to e4m3 too (``--fp8-activations``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from fwk.errors import ConfigError, ModelLoadError
from fwk.interfaces.quant import (
    ALL,
    PLAIN,
    LinearShape,
    PackedNumbers,
    ParamSpec,
    QuantContext,
    QuantMethod,
    RoundedRows,
)
from fwk_quant._common.layouts import activation_params, weights_arguments
from fwk_quant._common.product import multiply
from fwk_quant._linear_triton.choice import uses_triton
from fwk_quant.fp8.scaled import (
    BLOCK,
    LARGEST,
    block_product,
    block_product_of,
    padded_block_scales,
    row_product,
    row_product_of,
    scale_spacing,
    why_not,
)

if TYPE_CHECKING:
    from torch import Tensor

    from fwk_quant._linear_triton.matrix import TritonMatrix

SIGN_AND_MAGNITUDE = 0x87F00000 - 2**32
"""As an int32: bit 31, and the seven bits from 20 on."""


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """numbers: [rows, columns] float8_e4m3fn. scales: float32, [rows]; or of blocks, [rows / 128, columns / 128].

    rounds_input: whether activations become e4m3, by ``input_scale`` [] or, without, by their own largest numbers.
    for_triton: the same for kernels of ours, which compute all products, of rounded activations those of few tokens.
    """

    numbers: Tensor
    scales: Tensor
    rounds_input: bool = False
    input_scale: Tensor | None = None
    for_triton: TritonMatrix | None = None

    @property
    def is_block(self) -> bool:
        """Whether the scales are in blocks."""
        return self.scales.dim() == 2

    def dense(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Rows as numbers: scaled where scales are in blocks, else not yet."""
        numbers = decode(self.numbers[start:stop])
        if self.is_block:
            block = torch.arange(start, stop, device=numbers.device) // BLOCK
            numbers.mul_(self.scales[block].repeat_interleave(BLOCK, 1)[:, : numbers.shape[1]])
        return numbers.to(dtype)


class Fp8Method(QuantMethod):
    """A scale per output feature, per matrix of the checkpoint, or per block."""

    def __init__(self, context: QuantContext) -> None:
        super().__init__(context)
        self._is_fast = context.options.fp8_fast_accumulation
        self._uses_triton = uses_triton(context, context.options.fp8_gemm_backend, "--fp8-gemm-backend")

    def params(self, shape: LinearShape) -> Mapping[str, ParamSpec]:
        per_row = ParamSpec(0, 1, torch.float32, input_block=ALL, shards_input=False, is_uniform=True)
        scales = {"weight_scale": per_row}
        if self._has_blocks(shape):
            name = "weight_scale_inv" if shape.layout == "fp8:block" else "weight_scale"
            scales = {name: ParamSpec(0, 1, torch.float32, output_block=BLOCK, input_block=BLOCK)}
        found = {"weight": ParamSpec(0, 1, torch.float8_e4m3fn), **scales}
        return found if shape.layout == PLAIN else {**found, **activation_params()}

    def encode(self, weight: Tensor, prefix: str) -> Mapping[str, Tensor]:
        weight = weight.float()
        sizes = weight.abs()
        is_per_channel = self.context.options.fp8_scale == "channel"
        largest = sizes.amax(1, keepdim=True) if is_per_channel else sizes.max().expand(weight.shape[0], 1)
        scales = torch.where(largest > 0, largest / LARGEST, torch.ones_like(largest))
        numbers = (weight / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return {"weight": numbers, "weight_scale": scales}

    def finish(self, loaded: Mapping[str, Tensor], shape: LinearShape) -> Fp8Matrix:
        found = self._matrix(loaded, shape)
        if not self._uses_triton:
            return found
        from fwk_quant._linear_triton.matrix import TritonMatrix  # noqa: PLC0415 - imports triton

        packed = self.packed_numbers(found)
        if packed is None:
            raise ConfigError(
                f"--fp8-gemm-backend triton rounds activations by their own largest numbers, {shape.prefix} has a "
                "scale for them in the checkpoint: leave --fp8-activations 8bit out, and they are kept"
            )
        rows, columns = found.numbers.shape
        rounds = packed.rounds_input
        return replace(found, rounds_input=rounds, for_triton=TritonMatrix(packed, (rows, columns)))

    def _matrix(self, loaded: Mapping[str, Tensor], shape: LinearShape) -> Fp8Matrix:
        numbers = loaded["weight"]
        scales = loaded.get("weight_scale_inv", loaded.get("weight_scale"))
        assert scales is not None, "params() names one of the two"
        if not bool(torch.isfinite(scales).all()) or bool(((numbers.view(torch.int8) & 127) == 127).any()):
            raise ModelLoadError(
                f"{shape.prefix}: its weights or scales are infinite or not numbers: fetch the file again"
            )
        is_block = self._has_blocks(shape)
        if is_block:
            on_device = numbers.device.type == "cuda" and scales.shape[1] % 4
            scales = padded_block_scales(scales, (scale_spacing(numbers.device) if on_device else None) or 4)
        else:
            scales = scales.reshape(-1)
        if not self._rounds_input(numbers, shape, is_block=is_block):
            return Fp8Matrix(numbers, scales)
        # Parts of a fused layer share their input: the largest of their scales loses none of it.
        fixed = loaded.get("input_scale")
        return Fp8Matrix(numbers, scales, True, None if fixed is None else fixed.max())

    def apply(self, weights: Fp8Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
        size = (weights.numbers.shape[0], weights.numbers.shape[1])
        ours = weights.for_triton
        if ours is not None and x.dtype == self.context.dtype and (not weights.rounds_input or ours.is_for(x)):
            return ours.apply(x, bias)
        if not weights.rounds_input or x.dtype != self.context.dtype:
            scales = None if weights.is_block else weights.scales
            return multiply(x, size, lambda start, stop: weights.dense(start, stop, x.dtype), bias, scales)
        if not x.shape[0]:
            return x.new_empty(0, size[0])
        if weights.is_block:
            y = block_product(x, weights.numbers, weights.scales)
        else:
            y = row_product(x, weights.numbers, weights.scales, weights.input_scale, is_fast=self._is_fast)
        return y if bias is None else y.add_(bias)

    def input_group(self, weights: Fp8Matrix) -> int | None:
        if not weights.rounds_input or weights.input_scale is not None:
            return None
        return BLOCK if weights.is_block else weights.numbers.shape[1]

    def apply_rounded(self, weights: Fp8Matrix, x: RoundedRows, bias: Tensor | None) -> Tensor:
        ours = weights.for_triton
        if ours is not None and ours.is_for(x):
            return ours.apply_rounded(x, bias)
        if not x.shape[0]:
            return torch.empty(0, weights.numbers.shape[0], dtype=x.dtype, device=x.numbers.device)
        if weights.is_block:
            y = block_product_of(x, weights.numbers, weights.scales)
        else:
            y = row_product_of(x, weights.numbers, weights.scales, is_fast=self._is_fast)
        return y if bias is None else y.add_(bias)

    def packed_numbers(self, weights: Fp8Matrix) -> PackedNumbers | None:
        numbers, scales, rounds = weights.numbers, weights.scales, weights.rounds_input
        if weights.input_scale is not None:  # not a token's own
            if self.context.options.fp8_activations == "8bit":
                return None
            rounds = False
        if weights.is_block:
            return PackedNumbers("e4m3", numbers, scales, row_block=BLOCK, group_size=BLOCK, rounds_input=rounds)
        return PackedNumbers("e4m3", numbers, scales.view(-1, 1), group_size=numbers.shape[1], rounds_input=rounds)

    def _has_blocks(self, shape: LinearShape) -> bool:
        """Whether the layer's scales are in blocks. Raises ``ModelLoadError`` for what is not read."""
        strategy, size = None, None
        if shape.layout == "fp8:block":
            strategy, size = "block", self.context.checkpoint_config.get("weight_block_size")
        elif shape.layout == "modelopt:fp8-block":
            strategy, size = "block", [BLOCK, BLOCK]  # the only ones it writes
        elif shape.layout.startswith("compressed-tensors"):
            found = weights_arguments(self.context.checkpoint_config, shape.prefix)
            strategy, size = found.get("strategy"), found.get("block_structure")
            if strategy not in ("tensor", "channel", "block"):
                raise ModelLoadError(
                    f"{shape.prefix}: scales per {strategy!r} are not read, only per tensor, channel or block"
                )
        if strategy == "block" and size != [BLOCK, BLOCK]:
            raise ModelLoadError(f"{shape.prefix}: scales in blocks of {size} are not read, only of [{BLOCK}, {BLOCK}]")
        return strategy == "block"

    def _rounds_input(self, numbers: Tensor, shape: LinearShape, *, is_block: bool) -> bool:
        wanted, device = self.context.options.fp8_activations, self.context.device
        if wanted == "full" or (wanted == "auto" and device.type != "cuda"):
            return False
        rows, columns = numbers.shape
        why = why_not(rows, columns, is_block=is_block, dtype=self.context.dtype, device=device)
        if why is not None and wanted == "8bit":
            raise ConfigError(
                f"--fp8-activations 8bit is not possible: the scaled product {why} ({shape.prefix}); leave the flag out"
            )
        return why is None


def decode(numbers: Tensor) -> Tensor:
    """e4m3 to float32, 15 times faster on a CPU than torch's conversion: sign, exponent and fraction are moved to their
    places in a float32, whose exponent then is too small by the difference of the two biases, 127 - 7.

    Not a number comes out as 480: ``finish`` refuses it.
    """
    bits = numbers.view(torch.int8).to(torch.int32)  # repeats the sign bit to the left
    return bits.bitwise_left_shift_(20).bitwise_and_(SIGN_AND_MAGNITUDE).view(torch.float32).mul_(2.0**120)
