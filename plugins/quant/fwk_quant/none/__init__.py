"""Weights as the checkpoint has them."""

from fwk import QuantizerSpec, hookimpl
from fwk.config import Options, option


class PlainOptions(Options):
    """Options of ``quant.none``."""

    shorten_weights: bool = option(
        True,
        "Keep bfloat16 weights in 12 bits, without loss, on a CPU with bfloat16 instructions other than AMX's: linear "
        "layers of up to 8 tokens a step, which wait for memory, are 1.2 times as fast, those of many a little slower.",
    )


@hookimpl
def quantizers() -> list[QuantizerSpec]:
    return [
        QuantizerSpec(
            name="none",
            load="fwk_quant.none.method:PlainMethod",
            layouts=("plain",),
            exact=("plain",),
            api=2,
            options=PlainOptions,
            rank=10,
            summary="Unquantised weights; on a CPU by C++ kernels (AVX2, AVX-512, AMX), built on first use.",
        )
    ]
