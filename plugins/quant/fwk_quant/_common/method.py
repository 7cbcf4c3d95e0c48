"""What the integer quantisers share: their layouts, and quantising while loading."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch

from fwk.errors import ConfigError, ModelLoadError
from fwk.interfaces.native import NativeLinear
from fwk.interfaces.quant import ALL, PLAIN, LinearShape, PackedNumbers, ParamSpec, QuantContext, QuantMethod
from fwk.interfaces.weights_cache import PackedTensors
from fwk_quant._common.activations import integer_kernel
from fwk_quant._common.integers import MIDDLE, IntegerMatrix, pack, quantise
from fwk_quant._common.layouts import params, unpack
from fwk_quant._common.options import Activations, GemmBackend
from fwk_quant._linear_cpu.kernel import PackedMatrix
from fwk_quant._linear_cpu.packed import from_packed, layout_version, to_packed
from fwk_quant._linear_triton.choice import uses_triton

if TYPE_CHECKING:
    from torch import Tensor

    from fwk_quant._linear_triton.matrix import TritonMatrix

    Matrix = IntegerMatrix | PackedMatrix | TritonMatrix


class IntegerMethod(QuantMethod):
    """Weights of ``bits`` bits; activations are rounded to 8 bits where a native kernel computes."""

    bits: ClassVar[int]

    def __init__(self, context: QuantContext) -> None:
        super().__init__(context)
        self._uses_triton = uses_triton(context, self.gemm_backend, f"--int{self.bits}-gemm-backend")
        if self._uses_triton and self.activations == "8bit":
            raise ConfigError(
                f"--int{self.bits}-gemm-backend triton keeps activations as they are, "
                f"--int{self.bits}-activations 8bit rounds them: leave one of the two out"
            )
        flag = f"--int{self.bits}-activations"
        self._kernel = None if self._uses_triton else integer_kernel(context, self.activations, flag)
        self._variance = f"leaves products to torch ({flag} full)" if self.activations == "full" else ""

    @property
    def variance(self) -> str:
        return self._variance

    @property
    @abstractmethod
    def activations(self) -> Activations:
        """The user's choice."""

    @property
    @abstractmethod
    def gemm_backend(self) -> GemmBackend:
        """The user's choice."""

    @property
    @abstractmethod
    def group_size(self) -> int:
        """Inputs that share a scale when weights are quantised while loading; ``ALL``: all of them."""

    @property
    def has_zeros(self) -> bool:
        """Whether groups then have zero points of their own."""
        return False

    def params(self, shape: LinearShape) -> Mapping[str, ParamSpec]:
        if shape.layout != PLAIN:
            return params(shape.layout, self.bits, shape, self.context.checkpoint_config)
        group = self.group_size
        scales = ParamSpec(0, 1, shape.dtype, input_block=group, shards_input=group != ALL)
        found = {"numbers": ParamSpec(0, 1, torch.int8), "scales": scales}
        return {**found, "zeros": replace(scales, dtype=torch.uint8)} if self.has_zeros else found

    @property
    def encodes_from(self) -> torch.dtype:
        # Scales are rounded to the type they are kept in before numbers are, so that one makes up for the other.
        return self.context.dtype

    def encode(self, weight: Tensor, prefix: str) -> Mapping[str, Tensor]:
        size = weight.shape[1] if self.group_size == ALL else self.group_size
        if weight.shape[1] % size:
            raise ModelLoadError(
                f"{prefix}: groups of {size} do not divide its {weight.shape[1]} inputs; choose a smaller group size, "
                "or leave the layer out with --quantization-exclude"
            )
        weight = weight.to(self.encodes_from)
        if self._kernel is not None:
            middle = None if self.has_zeros else MIDDLE if self.bits == 4 else 0
            return self._kernel.packing.quantise(weight, self.bits, size, middle)
        return quantise(weight, self.bits, size, has_zeros=self.has_zeros)

    def finish(self, loaded: Mapping[str, Tensor], shape: LinearShape) -> list[Matrix]:
        if shape.layout == PLAIN:
            packed = pack(loaded["numbers"], self.bits)
            matrices = [IntegerMatrix(self.bits, packed, loaded["scales"], loaded.get("zeros"))]
        else:
            matrices = unpack(shape.layout, self.bits, loaded, shape, self.context.checkpoint_config)
        if self._uses_triton:
            return [self._for_triton(matrix, shape) for matrix in matrices]
        found: list[Matrix] = [self._for_kernel(matrix) for matrix in matrices]
        is_native = all(isinstance(matrix, PackedMatrix) for matrix in found)
        if not is_native and not self._variance:
            self._variance = f"leaves products to torch where the native kernel has no such groups ({shape.prefix})"
        if self.context.is_deterministic and not is_native:
            raise ModelLoadError(
                f"{shape.prefix}: the native kernel does not compute such groups, and torch's products depend on the "
                "number of tokens: leave the layer out (--quantization-exclude) or --enable-deterministic-inference"
            )
        return found

    def _for_kernel(self, matrix: IntegerMatrix) -> IntegerMatrix | PackedMatrix:
        if self._kernel is None:
            return matrix
        sorted_matrix, inputs = matrix.in_order()
        unsigned = sorted_matrix.unsigned()
        if unsigned is None:
            return matrix
        return replace(self._kernel.pack_slices(*matrix.size, unsigned), inputs=inputs)

    def _for_triton(self, matrix: IntegerMatrix, shape: LinearShape) -> TritonMatrix:
        from fwk_quant._linear_triton.matrix import TritonMatrix  # noqa: PLC0415 - imports triton

        in_order, columns = matrix.in_order()
        packed = in_order.for_kernels()
        if packed is None:
            raise ModelLoadError(
                f"{shape.prefix}: its groups differ in size, which --int{self.bits}-gemm-backend triton does not read: "
                "leave that flag out"
            )
        return TritonMatrix(packed, matrix.size, columns)

    def apply(self, weights: list[Matrix], x: Tensor, bias: Tensor | None) -> Tensor:
        if len(weights) == 1:
            return self._multiply(weights[0], x, bias)
        y = torch.cat([self._multiply(matrix, x, None) for matrix in weights], -1)
        return y if bias is None else y.add_(bias)

    @property
    def packed_version(self) -> str | None:
        if self._kernel is None:
            return None
        return f"{layout_version()} bits={self.bits} group={self.group_size} zeros={self.has_zeros}"

    def to_packed(self, weights: list[Matrix]) -> PackedTensors | None:
        packed = [matrix for matrix in weights if isinstance(matrix, PackedMatrix)]
        return to_packed(packed) if len(packed) == len(weights) else None

    def from_packed(self, packed: PackedTensors) -> list[Matrix]:
        return [*from_packed(packed)]

    def native(self, weights: list[Matrix], num_slices: int) -> list[NativeLinear] | None:
        found: list[NativeLinear] = []
        start = 0
        for matrix in weights:
            if self._kernel is None or not isinstance(matrix, PackedMatrix) or matrix.inputs is not None:
                return None
            found += [replace(x, first=start + x.first) for x in self._kernel.slices(matrix, num_slices)]
            start += matrix.size[0]
        return found

    def packed_numbers(self, weights: list[Matrix]) -> PackedNumbers | None:
        if self.activations == "8bit":
            return None
        found = [self._packed_numbers(matrix) for matrix in weights]
        parts = [part for part in found if part is not None]
        if len(parts) != len(weights) or len({(part.group_size, part.zeros is None) for part in parts}) != 1:
            return None
        if len(parts) == 1:
            return parts[0]
        zeros = [part.zeros for part in parts if part.zeros is not None]
        return replace(
            parts[0],
            numbers=torch.cat([part.numbers for part in parts]),
            scales=torch.cat([part.scales for part in parts]),
            zeros=torch.cat(zeros) if zeros else None,
        )

    def _packed_numbers(self, matrix: Matrix) -> PackedNumbers | None:
        if isinstance(matrix, PackedMatrix):
            return None
        if isinstance(matrix, IntegerMatrix):
            return matrix.for_kernels()
        return matrix.packed if matrix.order is None else None

    def _multiply(self, matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(matrix, PackedMatrix):
            assert self._kernel is not None
            return self._kernel.apply(matrix, x, bias)
        return matrix.apply(x, bias)
