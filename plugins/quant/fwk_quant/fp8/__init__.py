"""Eight-bit floating-point weights."""

from typing import Literal

from fwk import QuantizerSpec, hookimpl
from fwk.config import Options, option


class Fp8Options(Options):
    """Options of ``quant.fp8``, for weights that are quantised while loading."""

    fp8_scale: Literal["channel", "tensor"] = option(
        "channel", "One scale per output feature, or one for a whole matrix.", stability="beta"
    )


@hookimpl
def quantizers() -> list[QuantizerSpec]:
    """Declare the quantiser."""
    return [
        QuantizerSpec(
            name="fp8",
            load="fwk_quant.fp8.method:Fp8Method",
            layouts=("fp8", "compressed-tensors:float-quantized", "plain"),
            exact=("fp8", "compressed-tensors:float-quantized"),
            api=2,
            options=Fp8Options,
            summary="8-bit floating-point weights (e4m3); from quantised checkpoints or made while loading.",
        )
    ]
