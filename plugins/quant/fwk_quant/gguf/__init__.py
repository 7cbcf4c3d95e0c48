"""Block-quantised weights as GGUF files hold them."""

from fwk import QuantizerSpec, hookimpl
from fwk.config import Options
from fwk_quant._common.options import Activations, activations_option


class GGUFOptions(Options):
    """Options of ``quant.gguf``."""

    gguf_activations: Activations = activations_option()


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
            options=GGUFOptions,
            summary="The blocks of a GGUF file, kept packed in memory and in the CPU's kernels.",
        )
    ]
