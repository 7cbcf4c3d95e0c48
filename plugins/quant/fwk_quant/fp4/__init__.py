"""Four-bit floating-point weights in small blocks: NVFP4 and MXFP4."""

from fwk import QuantizerSpec, hookimpl
from fwk.config import Options
from fwk_quant._common.declaration import NativeOnCpuSpec
from fwk_quant._common.options import Activations, activations_option


class Fp4Options(Options):
    """Options of ``quant.fp4``."""

    fp4_activations: Activations = activations_option()


LAYOUTS = ("modelopt:nvfp4", "compressed-tensors:nvfp4-pack-quantized", "compressed-tensors:mxfp4-pack-quantized")


@hookimpl
def quantizers() -> list[QuantizerSpec]:
    """Declare the quantiser."""
    return [
        NativeOnCpuSpec(
            name="fp4",
            load="fwk_quant.fp4.method:Fp4Method",
            layouts=(*LAYOUTS, "plain"),
            exact=LAYOUTS,
            api=2,
            bits=4.5,
            options=Fp4Options,
            summary="4-bit floating-point weights: NVFP4 and MXFP4 checkpoints, or NVFP4 made while loading.",
        )
    ]
