"""Eight-bit integer weights."""

from fwk import QuantizerSpec, hookimpl
from fwk.config import Options
from fwk_quant._common.declaration import NativeOnCpuSpec
from fwk_quant._common.options import Activations, GemmBackend, activations_option, gemm_backend_option


class Int8Options(Options):
    """Options of ``quant.int8``."""

    int8_activations: Activations = activations_option()
    int8_gemm_backend: GemmBackend = gemm_backend_option()


@hookimpl
def quantizers() -> list[QuantizerSpec]:
    """Declare the quantiser."""
    return [
        NativeOnCpuSpec(
            name="int8",
            load="fwk_quant.int8.method:Int8Method",
            layouts=(
                "gptq:8",
                "compressed-tensors:int-quantized",
                "compressed-tensors:pack-quantized:8",
                "plain",
            ),
            exact=("gptq:8", "compressed-tensors:int-quantized", "compressed-tensors:pack-quantized:8"),
            api=2,
            bits=8.0,
            options=Int8Options,
            summary="8-bit integer weights, a scale per output; from quantised checkpoints or made while loading.",
        )
    ]
