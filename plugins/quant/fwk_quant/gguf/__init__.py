"""Block-quantised weights as GGUF files hold them."""

from fwk import QuantizerSpec, hookimpl
from fwk.config import Options
from fwk_quant._common.declaration import NativeOnCpuSpec
from fwk_quant._common.options import Activations, activations_option


class GGUFOptions(Options):
    """Options of ``quant.gguf``."""

    gguf_activations: Activations = activations_option()


SMALL = ("Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4")

LAYOUTS = tuple(f"gguf:{kind}" for kind in ("Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *SMALL))


@hookimpl
def quantizers() -> list[QuantizerSpec]:
    """Declare the quantiser."""
    return [
        NativeOnCpuSpec(
            name="gguf",
            load="fwk_quant.gguf.method:GGUFMethod",
            layouts=LAYOUTS,
            exact=LAYOUTS,
            api=2,
            options=GGUFOptions,
            summary="The blocks of a GGUF file, kept packed in memory and in the CPU's kernels.",
        )
    ]
