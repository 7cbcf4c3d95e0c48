"""Four-bit floating-point weights in small blocks: NVFP4 and MXFP4."""

from dataclasses import dataclass

from fwk import QuantizerSpec, hookimpl
from fwk.config import Options
from fwk.interfaces.declaration import Facts
from fwk_quant._common.declaration import NativeOnCpuSpec
from fwk_quant._common.options import Activations, activations_option


class Fp4Options(Options):
    """Options of ``quant.fp4``."""

    fp4_activations: Activations = activations_option()


STACK = "mxfp4"
"""All experts of a layer in one tensor; they can be read as numbers, too."""

LAYOUTS = (
    STACK,
    "modelopt:nvfp4",
    "compressed-tensors:nvfp4-pack-quantized",
    "compressed-tensors:mxfp4-pack-quantized",
)


@dataclass(frozen=True, kw_only=True)
class Fp4Spec(NativeOnCpuSpec):
    """Before numbers, where native kernels compute blocks as they are."""

    def auto_skip_reason(self, facts: Facts) -> str | None:
        if STACK not in facts.layouts:
            return super().auto_skip_reason(facts)
        if self.is_native(facts):
            return None
        return (
            "unpacks experts for each product here: auto reads their numbers, --quantization-layers '*.experts.*=fp4' "
            "takes less memory"
        )


@hookimpl
def quantizers() -> list[QuantizerSpec]:
    """Declare the quantiser."""
    return [
        Fp4Spec(
            name="fp4",
            load="fwk_quant.fp4.method:Fp4Method",
            layouts=(*LAYOUTS, "plain"),
            exact=LAYOUTS,
            api=2,
            bits=4.5,
            rank=20,
            options=Fp4Options,
            summary="4-bit floating-point weights: NVFP4 and MXFP4 checkpoints, or NVFP4 made while loading.",
        )
    ]
