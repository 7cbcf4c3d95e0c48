"""Weights as the checkpoint has them."""

from fwk import QuantizerSpec, hookimpl


@hookimpl
def quantizers() -> list[QuantizerSpec]:
    return [
        QuantizerSpec(
            name="none",
            load="fwk_quant.none.method:PlainMethod",
            layouts=("plain",),
            exact=("plain",),
            api=2,
            rank=10,
            summary="Unquantised weights; on a CPU by C++ kernels (AVX2, AVX-512, AMX), built on first use.",
        )
    ]
