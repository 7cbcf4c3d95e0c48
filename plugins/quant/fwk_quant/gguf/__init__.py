"""Block-quantised weights as GGUF files hold them."""

from fwk import QuantizerSpec, hookimpl


@hookimpl
def quantizers() -> list[QuantizerSpec]:
    """Declare the quantiser."""
    return [
        QuantizerSpec(
            name="gguf",
            load="fwk_quant.gguf.method:GGUFMethod",
            layouts=("gguf:Q8_0", "gguf:Q4_K", "gguf:Q6_K", "gguf:Q4_0", "gguf:Q4_1"),
            exact=("gguf:Q8_0", "gguf:Q4_K", "gguf:Q6_K", "gguf:Q4_0", "gguf:Q4_1"),
            api=2,
            summary="The blocks of a GGUF file, kept packed in memory: less memory than 'none', slower on a CPU.",
        )
    ]
