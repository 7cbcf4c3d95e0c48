"""Eight-bit floating-point weights."""

from typing import Literal

from fwk import QuantizerSpec, hookimpl
from fwk.config import Options, option
from fwk_quant._common.options import GemmBackend, gemm_backend_option


class Fp8Options(Options):
    """Options of ``quant.fp8``."""

    fp8_scale: Literal["channel", "tensor"] = option(
        "channel",
        "One scale per output feature, or one for a whole matrix, of weights that are quantised while loading.",
        stability="beta",
    )
    fp8_activations: Literal["auto", "8bit", "full"] = option(
        "auto",
        "Activations of these layers: 8bit rounds them to e4m3, with the checkpoint's scale or one for each token (for "
        "each 128 numbers of a token where weights have scales in blocks), for torch's scaled matrix products; full "
        "keeps them, and weights are unpacked for each product; auto: 8bit in bfloat16 on CUDA devices with such "
        "products, else full.",
        stability="beta",
    )
    fp8_fast_accumulation: bool = option(
        False,
        "Have torch's scaled products on CUDA devices keep sums in the matrix units' own precision, of about 14 bits, "
        "where scales are of rows or matrices: faster, less exact. Kernels of Triton and CPUs are not changed.",
        stability="beta",
    )
    fp8_gemm_backend: GemmBackend = gemm_backend_option()


LAYOUTS = ("fp8", "fp8:block", "modelopt:fp8", "modelopt:fp8-block", "compressed-tensors:float-quantized")


@hookimpl
def quantizers() -> list[QuantizerSpec]:
    """Declare the quantiser."""
    return [
        QuantizerSpec(
            name="fp8",
            load="fwk_quant.fp8.method:Fp8Method",
            layouts=(*LAYOUTS, "plain"),
            exact=LAYOUTS,
            api=2,
            bits=8.0,
            options=Fp8Options,
            summary="8-bit floating-point weights (e4m3); from quantised checkpoints or made while loading.",
        )
    ]
