"""Eight-bit integer weights."""

from fwk import QuantizerSpec, hookimpl


@hookimpl
def quantizers() -> list[QuantizerSpec]:
    """Declare the quantiser."""
    return [
        QuantizerSpec(
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
            summary="8-bit integer weights, a scale per output; from quantised checkpoints or made while loading.",
        )
    ]
