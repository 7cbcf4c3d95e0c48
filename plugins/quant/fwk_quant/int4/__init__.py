"""Four-bit integer weights in groups."""

from typing import Literal

from fwk import QuantizerSpec, hookimpl
from fwk.config import Options, option
from fwk_quant._common.declaration import NativeOnCpuSpec
from fwk_quant._common.options import Activations, GemmBackend, activations_option, gemm_backend_option


class Int4Options(Options):
    """Options of ``quant.int4``; group size and zero point are for weights that are quantised while loading."""

    int4_group_size: Literal[32, 64, 128] = option(
        64, "Inputs that share a scale; must divide those of every layer.", stability="beta"
    )
    int4_zero_point: bool = option(
        True,
        "Give each group a zero point of its own, so that its levels span just its range (more exact, slower).",
        stability="beta",
    )
    int4_activations: Activations = activations_option()
    int4_gemm_backend: GemmBackend = gemm_backend_option()


@hookimpl
def quantizers() -> list[QuantizerSpec]:
    """Declare the quantiser."""
    return [
        NativeOnCpuSpec(
            name="int4",
            load="fwk_quant.int4.method:Int4Method",
            layouts=("gptq:4", "awq:4", "compressed-tensors:pack-quantized:4", "plain"),
            exact=("gptq:4", "awq:4", "compressed-tensors:pack-quantized:4"),
            api=2,
            bits=4.5,
            options=Int4Options,
            summary="4-bit integer weights in groups; from GPTQ, AWQ and similar checkpoints, or made while loading.",
        )
    ]
